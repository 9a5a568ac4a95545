// Attention of clusters of queries to all keys, and of each query to the top keys of its cluster;
// see zoo_core/nn/clustered.py.

#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "clustered.h"
#include "rows.h"
#include "vectors.h"

namespace zoo {
namespace {

// What may be among a cluster's top keys, in their order.
struct Candidates {
  std::vector<uint32_t> score;  // in the order of floats
  std::vector<int32_t> at;

  void add(float x, int64_t key) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    // As in topk, NaN is the largest.
    bits = x == x ? bits ^ (bits >> 31 & INT32_MAX) : INT32_MAX;
    score.push_back(static_cast<uint32_t>(bits) ^ 0x80000000u), at.push_back(key);
  }

  // Writes where the `wanted` largest are, and forgets all.
  void choose(int64_t wanted, int32_t* to) {
    uint32_t least = 0;  // the largest number that so many reach, bit by bit
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1)
      if (reach(least | bit) >= wanted) least |= bit;
    int64_t equal = wanted;  // that are chosen
    for (const uint32_t x : score) equal -= x > least;
    for (size_t i = 0; i < at.size(); i++)
      if (score[i] > least || (score[i] == least && equal-- > 0)) *to++ = at[i];
    score.clear(), at.clear();
  }

 private:
  int64_t reach(uint32_t least) const {
    int32_t count = 0;
    for (const uint32_t x : score) count += x >= least;
    return count;
  }
};

// What `find_top` works in.
struct Found {
  Candidates candidates[TILE];
  Buffer groups;
};

// Bounds that T or more of the scores (m, V * W) of each cluster reach: of T groups of keys, the
// least of their largest.
template <int V>
void bound(const Buffer& scores, int64_t T, Buffer& groups, float* bounds) {
  const float *row = scores.data(), *end = row + scores.size();
  groups.assign(row, row + T * V * W);
  for (row += T * V * W; row < end;)
    for (float *to = groups.data(), *last = to + groups.size(); to < last && row < end;
         to += V * W, row += V * W)
      ZOO_UNROLL for (int v = 0; v < V; v++)
        store(to + W * v, larger(load(row + W * v), load(to + W * v)));
  vec least[V];
  ZOO_UNROLL for (int v = 0; v < V; v++) least[v] = load(groups.data() + W * v);
  for (int64_t t = 1; t < T; t++)
    ZOO_UNROLL for (int v = 0; v < V; v++)
      least[v] = smaller(load(groups.data() + (t * V + v) * W), least[v]);
  ZOO_UNROLL for (int v = 0; v < V; v++) store(bounds + W * v, least[v]);
}

// Scores (m, V * W), in units of log 2, to powers by the largest; `peak`: that, `total`: their sum.
template <int V>
void weigh(Buffer& scores, vec* peaks, vec* totals) {
  vec peak[V], total[V];
  float *first = scores.data(), *end = first + scores.size();
  ZOO_UNROLL for (int v = 0; v < V; v++) peak[v] = load(first + W * v), total[v] = vec{};
  for (float* row = first; row < end; row += V * W)
    ZOO_UNROLL for (int v = 0; v < V; v++) peak[v] = larger(peak[v], load(row + W * v));
  for (float* row = first; row < end; row += V * W)
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      const vec weight = exp2(load(row + W * v) - peak[v]);
      store(row + W * v, weight), total[v] += weight;
    }
  ZOO_UNROLL for (int v = 0; v < V; v++) peaks[v] = peak[v], totals[v] = total[v];
}

// Finds the top keys of n clusters, from c on, by their scores (m, lanes).
void find_top(Head& head, Found& found, int64_t c, int64_t n) {
  const int64_t m = static_cast<int64_t>(head.tokens.size()), T = head.T;
  float bounds[TILE];
  by_vectors(head.lanes, [&]<int V>() { bound<V>(head.scores, T, found.groups, bounds); });
  for (int64_t j = 0; j < m; j++) {
    const float* row = head.scores.data() + j * head.lanes;
    for (int64_t i = 0; i < n; i++)
      if (!(row[i] < bounds[i])) found.candidates[i].add(row[i], j);
  }
  for (int64_t i = 0; i < n; i++) found.candidates[i].choose(T, head.top + (c + i) * head.x.T);
}

// All clusters attend: their top keys, share, rest and mass.
void attend_clusters(Head& head) {
  const Call& x = head.x;
  const int64_t m = static_cast<int64_t>(head.tokens.size());
  Found found;
  head.see_all(0, m);
  head.over_clusters([&](int64_t c, int64_t n) {
    head.score_all();
    if (head.T > 0) find_top(head, found, c, n);
    vec peak[TILE / W], total[TILE / W];
    by_vectors(head.lanes, [&]<int V>() { weigh<V>(head.scores, peak, total); });
    for (int64_t i = 0; i < n; i++) {
      float inside = 0;
      for (int64_t t = 0; t < head.T; t++) {
        float& weight = head.scores[head.top[(c + i) * x.T + t] * head.lanes + i];
        inside += std::exchange(weight, 0.f);
      }
      head.share[c + i] = inside / total[i / W][i % W];
      head.mass[c + i] = peak[i / W][i % W] + std::log2(total[i / W][i % W]);
    }
    head.mix(head.scores, head.values, n, x.E);
    for (int64_t i = 0; i < n; i++) {
      const float factor = 1 / total[i / W][i % W], *from = head.out.data() + i * x.E;
      for (int64_t e = 0; e < x.E; e += W)
        store(head.rest + (c + i) * x.E + e, load(from + e) * factor);
    }
  });
}

// Each query attends to the top keys of its cluster, and adds what that gives of the others.
void attend_top(Head& head, Rows results) {
  const Call& x = head.x;
  for (int64_t c = 0; c < x.C; c++) {
    head.see_top(c);
    const float* rest = head.rest + c * x.E;
    head.members.parts(c, [&](const int64_t* at, int64_t n) {
      head.score(at, n);
      vec peak[TILE / W], total[TILE / W];
      by_vectors(head.lanes, [&]<int V>() { weigh<V>(head.scores, peak, total); });
      head.mix(head.scores, head.values, n, x.E);
      for (int64_t i = 0; i < n; i++) {
        const float sum = total[i / W][i % W], factor = head.share[c] / sum;
        const float* from = head.out.data() + i * x.E;
        float* to = results[at[i]];
        for (int64_t e = 0; e < x.E; e += W)
          store(to + e, load(from + e) * factor + load(rest + e));
        head.own[at[i]] = peak[i / W][i % W] + std::log2(sum);
      }
    });
  }
}

// The output, zeros at padding, and what is kept.
using Tensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Tensors attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& real, const at::Tensor& index, const at::Tensor& means,
    int64_t topk, double scale) {
  const Call x(q, k, v, index, means, real, topk, scale);
  const int64_t B = q.size(0);
  Kept kept;
  kept.top = at::empty({B, x.H, x.C, x.T}, q.options().dtype(at::kInt));
  kept.share = at::empty({B, x.H, x.C}, q.options()), kept.mass = at::empty_like(kept.share);
  kept.rest = at::empty({B, x.H, x.C, x.E}, q.options());
  kept.own = at::empty({B, x.H, x.N}, q.options());
  at::Tensor out = host_layout(q, x.E);
  if (real) out.zero_();
  x.over_heads([&](int64_t u, const std::vector<int64_t>& tokens) {
    Head head(x, kept, u, tokens);
    attend_clusters(head);
    const Rows results = rows_of(out, u / x.H, u % x.H);
    if (head.T > 0) return attend_top(head, results);
    for (int64_t c = 0; c < x.C; c++)
      for (int64_t i = head.members.start[c]; i < head.members.start[c + 1]; i++)
        std::copy_n(head.rest + c * x.E, x.E, results[head.members.order[i]]);
  });
  return {out, kept.top, kept.share, kept.rest, kept.mass, kept.own};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def(
      "clustered(Tensor q, Tensor k, Tensor v, Tensor? real, Tensor index, Tensor means, int topk, "
      "float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) { library.impl("clustered", &attend); }

}  // namespace zoo
