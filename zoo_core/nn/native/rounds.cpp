// Softmax attention of each query to the union of its windows; see zoo_core/nn/rounds.py.
//
// A head's rounds run one after the other, and each adds to the numerators and denominators that the earlier ones left.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "rows.h"
#include "scores.h"
#include "vectors.h"

namespace zoo {
namespace {

typedef uint32_t uvec __attribute__((vector_size(4 * W), aligned(4), may_alias));
using Integers = std::vector<int32_t, Aligned<int32_t>>;

// A `Windows` of hashing.py, and the tokens that it is about.
struct Windows {
  at::Tensor query, key, place, first;
  std::optional<at::Tensor> real;
  int64_t rounds, chunks, size, width, length;

  Windows(const at::Tensor& query, const at::Tensor& key, const std::optional<at::Tensor>& real,
          const at::Tensor& place, const at::Tensor& first, const at::Tensor& q)
      : query(query.contiguous()),
        key(key.contiguous()),
        place(place.contiguous()),
        first(first.contiguous()),
        rounds(query.size(2)),
        chunks(query.size(3)),
        size(query.size(4)),
        width(key.size(4)),
        length(place.size(3)) {
    if (real) this->real = real->contiguous();
    const std::vector<int64_t> sizes{q.size(0), q.size(1), rounds, q.size(2)};
    TORCH_CHECK(place.sizes() == sizes && first.sizes() == sizes, "windows of other tokens");
  }
};

// Some queries of a chunk, and the window that they see.
struct Part {
  int64_t round, n, lanes;
  const int64_t *queries, *keys;
  const bool* real;  // of each key, or nothing
};

// What is known of a head: of each token, one number for each round, side by side.
struct Head {
  Integers place, first;

  void read(const Windows& seen, int64_t head) {
    const int64_t R = seen.rounds, N = seen.length;
    turn(place, seen.place.data_ptr<int64_t>() + head * R * N, R, N);
    turn(first, seen.first.data_ptr<int64_t>() + head * R * N, R, N);
  }

  // Runs f(part) for all parts of all rounds.
  template <class F>
  static void parts(const Windows& seen, int64_t head, F f) {
    for (int64_t r = 0; r < seen.rounds; r++)
      for (int64_t c = 0; c < seen.chunks; c++) {
        const int64_t chunk = (head * seen.rounds + r) * seen.chunks + c;
        // The last chunk is filled up with tokens that have their place elsewhere.
        const int64_t end = std::min(seen.size, seen.length - c * seen.size);
        for (int64_t i = 0; i < end; i += TILE) {
          const int64_t n = std::min<int64_t>(TILE, end - i);
          f(Part{r, n, lanes_for(n), seen.query.data_ptr<int64_t>() + chunk * seen.size + i,
                 seen.key.data_ptr<int64_t>() + chunk * seen.width,
                 seen.real ? seen.real->data_ptr<bool>() + chunk * seen.width : nullptr});
        }
      }
  }

 private:
  static void turn(Integers& to, const int64_t* from, int64_t R, int64_t N) {
    to.resize(N * R);
    for (int64_t r = 0; r < R; r++)
      for (int64_t i = 0; i < N; i++) to[i * R + r] = static_cast<int32_t>(from[r * N + i]);
  }
};

// The scores of a part.
struct Tile : Scores {
  Head head;
  Integers first, token;  // (earlier rounds, lanes) and (lanes): of the queries
  Buffer grad;            // (n, width)

  void prepare(const Part& part, const Windows& seen, Rows k, Rows v) {
    const int64_t m = seen.width;
    resize(m, part.n);
    for (int64_t j = 0; j < m; j++) {
      TORCH_CHECK(0 <= part.keys[j] && part.keys[j] < seen.length, "key ", part.keys[j], " of ",
                  seen.length);
      keys[j] = k[part.keys[j]], values[j] = v[part.keys[j]];
    }
    token.assign(part.lanes, -1);
    first.assign(part.round * part.lanes, 0);
    for (int64_t i = 0; i < part.n; i++) {
      const int64_t t = part.queries[i];
      TORCH_CHECK(0 <= t && t < seen.length, "query ", t, " of ", seen.length);
      token[i] = static_cast<int32_t>(t);
      for (int64_t r = 0; r < part.round; r++)
        first[r * part.lanes + i] = head.first[t * seen.rounds + r];
    }
  }

  // to (width, lanes) = factor * from^T of the queries.
  void turn(Buffer& to, const Part& part, Rows from, int64_t width, float factor) {
    for (int64_t i = 0; i < part.n; i++) lines[i] = from[part.queries[i]];
    Scores::turn(to, part.n, width, factor);
  }

  // grad (n, width) = the queries' rows of `from`.
  void gather(const Part& part, Rows from, int64_t width) {
    grad.resize(part.n * width);
    for (int64_t i = 0; i < part.n; i++)
      std::copy_n(from[part.queries[i]], width, grad.data() + i * width);
  }
};

// Hides what does not count, of the scores of a key.
template <int V>
struct Hide {
  const Part& part;
  const Tile& tile;
  int64_t rounds;
  uint32_t width;
  float last_resort;  // added to a token's score of itself
  ivec token[V];

  Hide(const Part& part, const Tile& tile, const Windows& seen, float last_resort)
      : part(part),
        tile(tile),
        rounds(seen.rounds),
        width(static_cast<uint32_t>(seen.width)),
        last_resort(last_resort) {
    for (int v = 0; v < V; v++)
      token[v] = *reinterpret_cast<const ivec*>(tile.token.data() + W * v);
  }

  void operator()(int64_t j, vec* x) const {
    const int32_t key = static_cast<int32_t>(part.keys[j]);
    if (last_resort != 0)
      ZOO_UNROLL for (int v = 0; v < V; v++) x[v] = token[v] == key ? x[v] + last_resort : x[v];
    const int32_t *place = tile.head.place.data() + key * rounds, *first = tile.first.data();
    for (int64_t r = 0; r < part.round; r++, first += V * W) {
      ZOO_UNROLL for (int v = 0; v < V; v++) {
        const uvec from = *reinterpret_cast<const uvec*>(first + W * v);
        x[v] = static_cast<uint32_t>(place[r]) - from < width ? splat(HIDDEN) : x[v];
      }
    }
    if (part.real && !part.real[j])
      ZOO_UNROLL for (int v = 0; v < V; v++) x[v] = splat(HIDDEN);
  }
};

// Scores, in units of log 2, to weights by the largest score so far, `peaks`, and adds them to
// `totals`, both of which are kept by token; `shrink`: what has been added up so far is to be
// multiplied by.
template <int V>
void weigh(Tile& tile, const Part& part, const Windows& seen, float last_resort, float* peaks,
           float* totals, vec* shrink) {
  const Hide<V> hide(part, tile, seen, last_resort);
  const int64_t m = seen.width;
  float* scores = tile.scores.data();
  vec before[V], peak[V], total[V];
  for (int v = 0; v < V; v++) before[v] = splat(HIDDEN), total[v] = vec{};
  for (int64_t i = 0; i < part.n; i++) {
    before[i / W][i % W] = peaks[part.queries[i]];
    total[i / W][i % W] = totals[part.queries[i]];
  }
  for (int v = 0; v < V; v++) peak[v] = before[v];
  for (int64_t j = 0; j < m; j++) {
    float* row = scores + j * V * W;
    vec x[V];
    ZOO_UNROLL for (int v = 0; v < V; v++) x[v] = load(row + W * v);
    hide(j, x);
    ZOO_UNROLL for (int v = 0; v < V; v++) store(row + W * v, x[v]), peak[v] = larger(peak[v], x[v]);
  }
  // Where nothing is seen hidden scores are the largest, and have to weigh nothing all the same.
  vec from[V];
  for (int v = 0; v < V; v++) {
    from[v] = peak[v] == HIDDEN ? vec{} : peak[v];
    shrink[v] = exp2(before[v] - from[v]);
    total[v] *= shrink[v];
  }
  for (int64_t j = 0; j < m; j++) {
    float* row = scores + j * V * W;
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      const vec weight = exp2(load(row + W * v) - from[v]);
      store(row + W * v, weight);
      total[v] += weight;
    }
  }
  for (int64_t i = 0; i < part.n; i++) {
    peaks[part.queries[i]] = peak[i / W][i % W];
    totals[part.queries[i]] = total[i / W][i % W];
  }
}

// The same weights, by the logs to base 2 of the denominators of the union.
template <int V>
void weigh_again(Tile& tile, const Part& part, const Windows& seen, float last_resort,
                 const float* masses) {
  const Hide<V> hide(part, tile, seen, last_resort);
  float* scores = tile.scores.data();
  vec mass[V] = {};
  for (int64_t i = 0; i < part.n; i++) mass[i / W][i % W] = masses[part.queries[i]];
  for (int64_t j = 0; j < seen.width; j++) {
    float* row = scores + j * V * W;
    vec x[V];
    ZOO_UNROLL for (int v = 0; v < V; v++) x[v] = load(row + W * v);
    hide(j, x);
    ZOO_UNROLL for (int v = 0; v < V; v++) store(row + W * v, exp2(x[v] - mass[v]));
  }
}

// The outputs, zeros for a query that sees nothing, and the logs to base 2 of their denominators.
std::tuple<at::Tensor, at::Tensor> attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& query,
    const at::Tensor& key, const std::optional<at::Tensor>& real, const at::Tensor& place,
    const at::Tensor& first, double scale, double last_resort) {
  const int64_t B = q.size(0), H = q.size(1), N = q.size(2), D = q.size(3), E = v.size(3);
  const Windows seen(query, key, real, place, first, q);
  at::Tensor out = host_layout(q, E), mass = at::empty({B, H, N}, q.options());
  const float unit = static_cast<float>(scale) * LOG2_E;
  const float own = static_cast<float>(last_resort) * LOG2_E;
  at::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    Tile tile;
    Buffer sums, totals;
    for (int64_t u = begin; u < end; u++) {
      const int64_t b = u / H, h = u % H;
      const Rows queries = rows_of(q, b, h), keys = rows_of(k, b, h), values = rows_of(v, b, h);
      float* peaks = mass.data_ptr<float>() + u * N;
      std::fill_n(peaks, N, HIDDEN);
      totals.assign(N, 0.f), sums.resize(N * E);
      tile.head.read(seen, u);
      Head::parts(seen, u, [&](const Part& part) {
        tile.prepare(part, seen, keys, values);
        tile.turn(tile.queries, part, queries, D, unit);
        tile.against(tile.scores, tile.keys, tile.queries, D);
        vec shrink[TILE / W];
        by_vectors(part.lanes, [&]<int V>() {
          weigh<V>(tile, part, seen, own, peaks, totals.data(), shrink);
        });
        tile.mix(tile.scores, tile.values, part.n, E);
        for (int64_t i = 0; i < part.n; i++) {
          const float factor = shrink[i / W][i % W], *from = tile.out.data() + i * E;
          float* to = sums.data() + part.queries[i] * E;
          if (part.round == 0) std::copy_n(from, E, to);
          else add(to, factor, from, E);
        }
      });
      const Rows results = rows_of(out, b, h);
      for (int64_t i = 0; i < N; i++) {
        const float factor = totals[i] > 0.f ? 1.f / totals[i] : 0.f, *from = sums.data() + i * E;
        float* to = results[i];
        for (int64_t e = 0, width = E; e < width; e += W) store(to + e, load(from + e) * factor);
        peaks[i] = totals[i] > 0.f ? peaks[i] + std::log2(totals[i]) : 0.f;
      }
    }
  });
  return {out, mass};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& mass, const at::Tensor& query, const at::Tensor& key,
    const std::optional<at::Tensor>& real, const at::Tensor& place, const at::Tensor& first,
    double scale, double last_resort) {
  const int64_t B = q.size(0), H = q.size(1), N = q.size(2), D = q.size(3), E = v.size(3);
  const Windows seen(query, key, real, place, first, q);
  at::Tensor grad_q = host_layout(q, D).zero_(), grad_k = host_layout(k, D).zero_();
  at::Tensor grad_v = host_layout(v, E).zero_();
  const float unit = static_cast<float>(scale) * LOG2_E;
  const float own = static_cast<float>(last_resort) * LOG2_E;
  at::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    Tile tile;
    Buffer dots;
    for (int64_t u = begin; u < end; u++) {
      const int64_t b = u / H, h = u % H;
      const Rows queries = rows_of(q, b, h), keys = rows_of(k, b, h), values = rows_of(v, b, h);
      const Rows grads = rows_of(grad, b, h), results = rows_of(out, b, h);
      const Rows of_q = rows_of(grad_q, b, h), of_k = rows_of(grad_k, b, h);
      const Rows of_v = rows_of(grad_v, b, h);
      const float* masses = mass.data_ptr<float>() + u * N;
      dots.resize(N);
      for (int64_t i = 0; i < N; i++) dots[i] = dot(grads[i], results[i], E);
      tile.head.read(seen, u);
      Head::parts(seen, u, [&](const Part& part) {
        const int64_t n = part.n;
        tile.prepare(part, seen, keys, values);
        tile.turn(tile.queries, part, queries, D, unit);
        tile.against(tile.scores, tile.keys, tile.queries, D);
        by_vectors(part.lanes, [&]<int V>() { weigh_again<V>(tile, part, seen, own, masses); });
        tile.gather(part, grads, E);
        const auto value = [&](int64_t j) { return of_v[part.keys[j]]; };
        tile.spread(value, tile.scores, tile.grad.data(), E, n, E);

        vec common[TILE / W] = {};
        for (int64_t i = 0; i < n; i++) common[i / W][i % W] = dots[part.queries[i]];
        tile.turn(tile.grads, part, grads, E, 1.f);
        tile.against(tile.of_scores, tile.values, tile.grads, E);
        by_vectors(part.lanes, [&]<int V>() { tile.pull<V>(common, static_cast<float>(scale)); });
        tile.gather(part, queries, D);
        const auto key = [&](int64_t j) { return of_k[part.keys[j]]; };
        tile.spread(key, tile.of_scores, tile.grad.data(), D, n, D);
        tile.mix(tile.of_scores, tile.keys, n, D);
        for (int64_t i = 0; i < n; i++) {
          const float* from = tile.out.data() + i * D;
          add(of_q[part.queries[i]], 1.f, from, D);
        }
      });
    }
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def(
      "rounds_native(Tensor q, Tensor k, Tensor v, Tensor query, Tensor key, Tensor? real, "
      "Tensor place, Tensor first, float scale, float last_resort) -> (Tensor, Tensor)");
  library.def(
      "rounds_native_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor mass, "
      "Tensor query, Tensor key, Tensor? real, Tensor place, Tensor first, float scale, "
      "float last_resort) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("rounds_native", &attend);
  library.impl("rounds_native_backward", &attend_backward);
}

}  // namespace zoo
