// K-means on the tokens of each head; see zoo_core/nn/clustering.py, which computes the same by
// single operations.
//
// Members are added up as soon as they are known: no matrix of tokens and clusters is made.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "rows.h"
#include "scores.h"
#include "vectors.h"

namespace zoo {
namespace {

// The first of the m largest scores (m, V * W), less `offsets`, of each token. As with argmax, a
// first score that is NaN is the largest.
template <int V>
void largest(const float* scores, const float* offsets, int64_t m, int32_t* found) {
  vec best[V];
  ivec at[V];
  ZOO_UNROLL for (int v = 0; v < V; v++) best[v] = load(scores + W * v) - offsets[0], at[v] = ivec{};
  for (int64_t c = 1; c < m; c++) {
    const ivec here = ivec{} + static_cast<int32_t>(c);
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      const vec x = load(scores + (c * V + v) * W) - offsets[c];
      at[v] = x > best[v] ? here : at[v];
      best[v] = larger(x, best[v]);
    }
  }
  ZOO_UNROLL for (int v = 0; v < V; v++) *reinterpret_cast<ivec*>(found + W * v) = at[v];
}

// The clusters of one head, of which there are as many as `keys`, the centroids.
struct Clusters : Scores {
  Rows x;
  int64_t width;
  Buffer centroids, offsets, sums;
  std::vector<int64_t> sizes;

  Clusters(Rows x, int64_t width) : x(x), width(width) {}

  // Begins with `number` of the points, evenly spaced.
  void begin(const std::vector<int64_t>& points, int64_t number) {
    const int64_t M = static_cast<int64_t>(points.size());
    resize(number, TILE);
    centroids.resize(number * width), offsets.resize(number), sizes.resize(number);
    for (int64_t c = 0; c < number; c++) {
      std::copy_n(x[points[c * M / number]], width, centroids.data() + c * width);
      keys[c] = centroids.data() + c * width;
    }
  }

  // Runs f(token, its cluster), and adds up the tokens of each.
  template <class F>
  void assign(const std::vector<int64_t>& tokens, F f) {
    const int64_t N = static_cast<int64_t>(tokens.size()), C = static_cast<int64_t>(keys.size());
    sums.assign(C * width, 0.f), std::fill(sizes.begin(), sizes.end(), 0);
    // |x - c|^2 = |x|^2 - 2 (x.c - |c|^2 / 2), and |x|^2 is the same for every c.
    for (int64_t c = 0; c < C; c++) offsets[c] = dot(keys[c], keys[c], width) / 2;
    for (int64_t i = 0; i < N; i += TILE) {
      const int64_t n = std::min<int64_t>(TILE, N - i);
      for (int64_t j = 0; j < n; j++) lines[j] = x[tokens[i + j]];
      lanes = lanes_for(n);
      turn(queries, n, width, 1.f);
      for (int64_t j = i + n; j < std::min<int64_t>(i + n + TILE, N); j++) fetch(x[tokens[j]], width);
      against(scores, keys, queries, width);
      int32_t found[TILE];
      by_vectors(lanes, [&]<int V>() { largest<V>(scores.data(), offsets.data(), C, found); });
      for (int64_t j = 0; j < n; j++) {
        float* to = sums.data() + found[j] * width;
        add(to, 1.f, lines[j], width);
        sizes[found[j]]++;
        f(tokens[i + j], found[j]);
      }
    }
  }

  // Means of what `assign` has added up; `to` is left as it is where that is nothing.
  void average(float* to) const {
    for (size_t c = 0; c < keys.size(); c++)
      for (int64_t d = 0; sizes[c] && d < width; d += W)
        store(to + c * width + d, load(sums.data() + c * width + d) / static_cast<float>(sizes[c]));
  }
};

// The cluster of each token (B, H, N), 0 at padding, and the means (B, H, C, D), 0 without tokens.
std::tuple<at::Tensor, at::Tensor> clusters(
    const at::Tensor& x, const std::optional<at::Tensor>& real, int64_t number, int64_t iterations,
    int64_t sample) {
  const int64_t B = x.size(0), H = x.size(1), N = x.size(2), D = x.size(3);
  TORCH_CHECK(0 < number && number <= N, number, " clusters of ", N, " tokens");
  at::Tensor index = at::zeros({B, H, N}, x.options().dtype(at::kLong));
  at::Tensor means = at::zeros({B, H, number, D}, x.options());
  at::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; u++) {
      const std::vector<int64_t> tokens = real_tokens(real, u / H, N);
      const int64_t n = static_cast<int64_t>(tokens.size());
      if (n == 0) continue;
      std::vector<int64_t> points(std::min(sample, n));
      for (int64_t i = 0, M = static_cast<int64_t>(points.size()); i < M; i++)
        points[i] = tokens[i * n / M];
      Clusters found(rows_of(x, u / H, u % H), D);
      found.begin(points, std::min(number, n));
      for (int64_t i = 0; i < iterations; i++) {
        found.assign(points, [](int64_t, int32_t) {});
        found.average(found.centroids.data());
      }
      int64_t* to = index.data_ptr<int64_t>() + u * N;
      found.assign(tokens, [&](int64_t token, int32_t cluster) { to[token] = cluster; });
      found.average(means.data_ptr<float>() + u * number * D);
    }
  });
  return {index, means};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def(
      "clusters(Tensor x, Tensor? real, int number, int iterations, int sample) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("clusters", &clusters);
}

}  // namespace zoo
