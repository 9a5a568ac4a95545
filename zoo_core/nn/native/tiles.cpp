// Softmax attention of tiles of queries to runs of keys; see zoo_core/nn/tiles.py.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "rows.h"
#include "scores.h"
#include "vectors.h"

namespace zoo {
namespace {

constexpr int64_t ALL = -1;  // one bit of a key's `lanes` for each query of a tile

// The keys of a tile, each once, and which of its queries see it.
struct Seen {
  std::vector<int64_t> key, lanes;

  // runs: P x 6, as in tiles.py. queries: how many the tile has. keys: S.
  void read(const int32_t* runs, int64_t P, int64_t queries, int64_t keys) {
    if (runs == read_) return;  // heads share them
    read_ = runs;
    for (const int64_t j : key) place_[j] = -1;
    place_.resize(keys, -1);
    key.clear(), lanes.clear();
    for (int64_t p = 0; p < P; p++, runs += 6) {
      const int64_t start = runs[0], count = runs[1];
      TORCH_CHECK(count <= 0 || (start >= 0 && start + count <= keys), "a run of ", count,
                  " keys from ", start, " on leaves the ", keys, " that there are");
      int64_t first = runs[2], last = runs[4];
      for (int64_t j = start; j < start + count; j++, first += runs[3], last += runs[5]) {
        const int64_t from = std::max<int64_t>(first, 0), to = std::min(last, queries - 1);
        if (from > to) continue;
        const int64_t some = static_cast<int64_t>(~uint64_t{0} >> (TILE - 1 - (to - from)) << from);
        if (place_[j] < 0) {
          place_[j] = size();
          key.push_back(j), lanes.push_back(some);
        } else {
          lanes[place_[j]] |= some;
        }
      }
    }
  }
  int64_t size() const { return static_cast<int64_t>(key.size()); }

 private:
  const int32_t* read_ = nullptr;
  std::vector<int64_t> place_;  // of each key in `key`, -1 where it is not
};

template <int... I>
constexpr ivec bits(std::integer_sequence<int, I...>) {
  return ivec{(1 << I)...};
}
const ivec BIT = bits(std::make_integer_sequence<int, W>{});

// Which of the W queries from W * v on see a key.
inline ivec visible(int64_t lanes, int v) {
  const int some = static_cast<int>(static_cast<uint64_t>(lanes) >> (W * v));
  return (BIT & some) != 0;
}

// The scores of a tile.
struct Tile : Scores {
  Seen seen;

  void prepare(const int32_t* runs, int64_t P, int64_t n, int64_t S, Rows k, Rows v) {
    seen.read(runs, P, n, S);
    resize(seen.size(), n);
    for (int64_t j = 0; j < seen.size(); j++) keys[j] = k[seen.key[j]], values[j] = v[seen.key[j]];
  }

  // to (width, lanes) = factor * from^T, of n rows.
  void turn(Buffer& to, Rows from, int64_t n, int64_t width, float factor) {
    for (int64_t i = 0; i < n; i++) lines[i] = from[i];
    Scores::turn(to, n, width, factor);
  }
};

// Scores, in units of log 2, to weights; writes the log of each denominator, -inf without a key.
template <int V>
void weigh(Tile& tile, float* mass, int64_t n, vec* share) {
  const int64_t m = tile.seen.size();
  float* scores = tile.scores.data();
  vec peak[V], total[V];
  for (int v = 0; v < V; v++) peak[v] = splat(HIDDEN), total[v] = vec{};
  for (int64_t j = 0; j < m; j++) {
    const int64_t lanes = tile.seen.lanes[j];
    float* row = scores + j * V * W;
    if (lanes == ALL) {
      ZOO_UNROLL for (int v = 0; v < V; v++) peak[v] = larger(peak[v], load(row + W * v));
      continue;
    }
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      const vec x = visible(lanes, v) ? load(row + W * v) : splat(HIDDEN);
      store(row + W * v, x);
      peak[v] = larger(peak[v], x);
    }
  }
  // Where nothing is seen hidden scores are the largest, and have to weigh nothing all the same.
  for (int v = 0; v < V; v++) peak[v] = peak[v] == HIDDEN ? vec{} : peak[v];
  for (int64_t j = 0; j < m; j++) {
    float* row = scores + j * V * W;
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      const vec weight = exp2(load(row + W * v) - peak[v]);
      store(row + W * v, weight);
      total[v] += weight;
    }
  }
  for (int v = 0; v < V; v++) share[v] = total[v] > 0.f ? 1.f / total[v] : vec{};
  for (int64_t i = 0; i < n; i++)
    mass[i] = peak[i / W][i % W] / LOG2_E + std::log(total[i / W][i % W]);
}

// The same weights once more, by the logs of their denominators.
template <int V>
void weigh_again(Tile& tile, const float* mass, int64_t n) {
  vec log2_total[V];
  for (int i = 0; i < V * W; i++) log2_total[i / W][i % W] = i < n ? mass[i] * LOG2_E : 0;
  float* scores = tile.scores.data();
  for (int64_t j = 0; j < tile.seen.size(); j++) {
    const int64_t lanes = tile.seen.lanes[j];
    float* row = scores + j * V * W;
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      const vec weight = exp2(load(row + W * v) - log2_total[v]);
      store(row + W * v, lanes == ALL ? weight : visible(lanes, v) ? weight : vec{});
    }
  }
}

// The runs of the tiles, of which those of one sample or head may serve all, and where tiles begin.
struct Runs {
  const int32_t *base, *borders;
  int64_t of_sample, of_head, tiles, number;

  Runs(const at::Tensor& x, const at::Tensor& borders, int64_t queries)
      : base(x.data_ptr<int32_t>()),
        borders(borders.data_ptr<int32_t>()),
        of_sample(x.size(0) > 1 ? x.stride(0) : 0),
        of_head(x.size(1) > 1 ? x.stride(1) : 0),
        tiles(x.size(2)),
        number(x.size(3)) {
    TORCH_CHECK(borders.size(0) == tiles + 1, "one border more than tiles");
    for (int64_t r = 0; r < tiles; r++)
      TORCH_CHECK(0 <= queries_of(r) && queries_of(r) <= TILE, "a tile of ", queries_of(r), " queries");
    TORCH_CHECK(this->borders[0] == 0 && this->borders[tiles] == queries, "tiles leave queries out");
  }
  int64_t queries_of(int64_t r) const { return borders[r + 1] - borders[r]; }
  const int32_t* at(int64_t b, int64_t h, int64_t r) const {
    return base + b * of_sample + h * of_head + r * number * 6;
  }
};

std::tuple<at::Tensor, at::Tensor> attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& runs_of,
    const at::Tensor& borders, double scale) {
  const int64_t B = q.size(0), H = q.size(1), N = q.size(2), D = q.size(3), E = v.size(3);
  const Runs runs(runs_of, borders, N);
  at::Tensor out = host_layout(q, E), mass = at::empty({B, H, N}, q.options());
  const float unit = static_cast<float>(scale) * LOG2_E;
  at::parallel_for(0, B * runs.tiles * H, 1, [&](int64_t begin, int64_t end) {
    Tile tile;
    for (int64_t u = begin; u < end; u++) {  // heads innermost: hosts store a token's side by side
      const int64_t h = u % H, r = u / H % runs.tiles, b = u / H / runs.tiles;
      const int64_t start = runs.borders[r], n = runs.queries_of(r);
      const Rows queries = rows_of(q, b, h).from(start), results = rows_of(out, b, h).from(start);
      tile.prepare(runs.at(b, h, r), runs.number, n, k.size(2), rows_of(k, b, h),
                   rows_of(v, b, h));
      tile.turn(tile.queries, queries, n, D, unit);
      tile.against(tile.scores, tile.keys, tile.queries, D);
      vec share[TILE / W];
      float* masses = mass.data_ptr<float>() + (b * H + h) * N + start;
      by_vectors(tile.lanes, [&]<int V>() { weigh<V>(tile, masses, n, share); });
      tile.mix(tile.scores, tile.values, n, E);
      for (int64_t i = 0; i < n; i++) {
        const float factor = share[i / W][i % W], *from = tile.out.data() + i * E;
        float* to = results[i];
        for (int64_t e = 0; e < E; e += W) store(to + e, load(from + e) * factor);
      }
    }
  });
  return {out, mass};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& mass, const at::Tensor& runs_of,
    const at::Tensor& borders, double scale) {
  const int64_t B = q.size(0), H = q.size(1), N = q.size(2), D = q.size(3), E = v.size(3);
  const Runs runs(runs_of, borders, N);
  at::Tensor grad_q = host_layout(q, D);
  at::Tensor grad_k = host_layout(k, D).zero_(), grad_v = host_layout(v, E).zero_();
  const float unit = static_cast<float>(scale) * LOG2_E;
  // A head's tiles one after the other, since they add to the same keys, each for all heads of a
  // thread: hosts store a token's side by side.
  over_heads(B, H, [&](int64_t b, int64_t first, int64_t some) {
    Tile tile;
    for (int64_t u = 0; u < runs.tiles * some; u++) {
      const int64_t r = u / some, h = first + u % some;
      const Rows of_k = rows_of(grad_k, b, h), of_v = rows_of(grad_v, b, h);
      const int64_t start = runs.borders[r], n = runs.queries_of(r);
      const Rows queries = rows_of(q, b, h).from(start), results = rows_of(out, b, h).from(start);
      const Rows grads = rows_of(grad, b, h).from(start), of_q = rows_of(grad_q, b, h).from(start);
      tile.prepare(runs.at(b, h, r), runs.number, n, k.size(2), rows_of(k, b, h), rows_of(v, b, h));

      tile.turn(tile.queries, queries, n, D, unit);
      tile.against(tile.scores, tile.keys, tile.queries, D);
      const float* masses = mass.data_ptr<float>() + (b * H + h) * N + start;
      by_vectors(tile.lanes, [&]<int V>() { weigh_again<V>(tile, masses, n); });
      const auto value = [&](int64_t j) { return of_v[tile.seen.key[j]]; };
      tile.spread(value, tile.scores, grads.base, grads.stride, n, E);

      vec common[TILE / W] = {};
      for (int64_t i = 0; i < n; i++) common[i / W][i % W] = dot(grads[i], results[i], E);
      tile.turn(tile.grads, grads, n, E, 1.f);
      tile.against(tile.of_scores, tile.values, tile.grads, E);
      by_vectors(tile.lanes, [&]<int V>() { tile.pull<V>(common, static_cast<float>(scale)); });
      const auto key = [&](int64_t j) { return of_k[tile.seen.key[j]]; };
      tile.spread(key, tile.of_scores, queries.base, queries.stride, n, D);
      tile.mix(tile.of_scores, tile.keys, n, D);
      for (int64_t i = 0; i < n; i++) std::copy_n(tile.out.data() + i * D, D, of_q[i]);
    }
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def(
      "tiles(Tensor q, Tensor k, Tensor v, Tensor runs, "
      "Tensor borders, float scale) -> (Tensor, Tensor)");
  library.def(
      "tiles_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor mass, "
      "Tensor runs, Tensor borders, float scale) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("tiles", &attend);
  library.impl("tiles_backward", &attend_backward);
}

}  // namespace zoo
