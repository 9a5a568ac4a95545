// Softmax attention of tiles of queries to runs of keys; see zoo_core/nn/tiles.py.
//
// Scores are kept with the queries of a tile side by side, (keys, TILE): a vector then holds the
// same key's scores of several queries, so that maxima and sums need no vector's own elements, and
// keys and values are read where they lie.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "rows.h"
#include "vectors.h"

namespace zoo {
namespace {

constexpr int TILE = 64;          // queries; one bit of a key's `lanes` for each
constexpr int VECTORS_OF_TILE = TILE / W;
constexpr int KEYS = 96;          // values that are mixed at once: they, and their weights, fit L1
constexpr float HIDDEN = -1e30f;  // the score of what is not seen
constexpr int64_t ALL = -1;

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

// What a thread works in.
struct Tile {
  Seen seen;
  Buffer queries, grads;     // (width, TILE): of the tile, turned
  Buffer scores, of_scores;  // (keys, TILE)
  Buffer out;                // (TILE, width)
  std::vector<const float*> keys, values;
  std::vector<float*> rows;
  int64_t lanes;  // as many as hold its queries: one vector, or all

  void prepare(const int32_t* runs, int64_t P, int64_t n, int64_t S, Rows k, Rows v) {
    seen.read(runs, P, n, S);
    lanes = n <= W ? W : TILE;
    const int64_t m = seen.size();
    keys.resize(m), values.resize(m), rows.resize(m);
    for (int64_t j = 0; j < m; j++) keys[j] = k[seen.key[j]], values[j] = v[seen.key[j]];
  }

  // to = scale * from^T, of n rows; lanes beyond n hold zeros.
  static void turn(Buffer& to, Rows from, int64_t n, int64_t width, float scale) {
    to.resize(width * TILE);
    float* out = to.data();
    for (int64_t i = 0; i < n; i++) {
      const float* row = from[i];
      for (int64_t d = 0; d < width; d++) out[d * TILE + i] = scale * row[d];
    }
    for (int64_t i = n; i < TILE; i++)
      for (int64_t d = 0; d < width; d++) out[d * TILE + i] = 0;
  }

  // to (keys, TILE) = a b, a by rows, b turned.
  void against(Buffer& to, const std::vector<const float*>& a,
               const Buffer& b, int64_t width) {
    const int64_t m = seen.size();
    to.resize(m * TILE);
    for (int64_t j = 0; j < m; j++) rows[j] = to.data() + j * TILE;
    rows_product(m, lanes, width, a.data(), b.data(), TILE, rows.data(), false);
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
    float* row = scores + j * TILE;
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
    float* row = scores + j * TILE;
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
    float* row = scores + j * TILE;
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      const vec weight = exp2(load(row + W * v) - log2_total[v]);
      store(row + W * v, lanes == ALL ? weight : visible(lanes, v) ? weight : vec{});
    }
  }
}

// Weights to the gradients of scores, by those of the outputs, which are in of_scores.
template <int V>
void pull(Tile& tile, const vec* common, float scale) {
  for (int64_t j = 0; j < tile.seen.size(); j++) {
    float *of_row = tile.of_scores.data() + j * TILE, *row = tile.scores.data() + j * TILE;
    ZOO_UNROLL for (int v = 0; v < V; v++)
      store(of_row + W * v, load(row + W * v) * (load(of_row + W * v) - common[v]) * scale);
  }
}

// Runs f<V>() for V vectors of queries: those of a tile.
template <class F>
void by_vectors(const Tile& tile, F f) {
  if (tile.lanes == W) f.template operator()<1>();
  else f.template operator()<VECTORS_OF_TILE>();
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
      TORCH_CHECK(0 < queries_of(r) && queries_of(r) <= TILE, "a tile of ", queries_of(r), " queries");
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
      Rows queries = rows_of(q, b, h), results = rows_of(out, b, h);
      queries.base += start * queries.stride, results.base += start * results.stride;
      tile.prepare(runs.at(b, h, r), runs.number, n, k.size(2), rows_of(k, b, h),
                   rows_of(v, b, h));
      Tile::turn(tile.queries, queries, n, D, unit);
      tile.against(tile.scores, tile.keys, tile.queries, D);
      vec share[VECTORS_OF_TILE];
      float* masses = mass.data_ptr<float>() + (b * H + h) * N + start;
      by_vectors(tile, [&]<int V>() { weigh<V>(tile, masses, n, share); });
      tile.out.assign(TILE * E, 0.f);
      for (int64_t j = 0; j < tile.seen.size(); j += KEYS)
        columns_product(n, E, std::min<int64_t>(KEYS, tile.seen.size() - j),
                        tile.scores.data() + j * TILE, TILE, tile.values.data() + j,
                        tile.out.data(), E, j > 0);
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
  // A head's tiles one after the other: they add to the same keys.
  at::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    Tile tile;
    for (int64_t u = begin; u < end; u++) {
      const int64_t b = u / H, h = u % H;
      const Rows of_k = rows_of(grad_k, b, h), of_v = rows_of(grad_v, b, h);
      for (int64_t r = 0; r < runs.tiles; r++) {
        const int64_t start = runs.borders[r], n = runs.queries_of(r);
        Rows queries = rows_of(q, b, h), results = rows_of(out, b, h);
        Rows grads = rows_of(grad, b, h), of_q = rows_of(grad_q, b, h);
        for (Rows* x : {&queries, &results, &grads, &of_q}) x->base += start * x->stride;
        tile.prepare(runs.at(b, h, r), runs.number, n, k.size(2), rows_of(k, b, h),
                     rows_of(v, b, h));
        const int64_t m = tile.seen.size();

        Tile::turn(tile.queries, queries, n, D, unit);
        tile.against(tile.scores, tile.keys, tile.queries, D);
        const float* masses = mass.data_ptr<float>() + (b * H + h) * N + start;
        by_vectors(tile, [&]<int V>() { weigh_again<V>(tile, masses, n); });
        for (int64_t j = 0; j < m; j++) tile.keys[j] = tile.scores.data() + j * TILE;
        for (int64_t j = 0; j < m; j++) tile.rows[j] = of_v[tile.seen.key[j]];
        rows_product(m, E, n, tile.keys.data(), grads.base, grads.stride, tile.rows.data(), true);

        vec common[VECTORS_OF_TILE] = {};
        for (int64_t i = 0; i < n; i++) {
          vec dot{};
          for (int64_t e = 0; e < E; e += W) dot += load(grads[i] + e) * load(results[i] + e);
          common[i / W][i % W] = sum(dot);
        }
        Tile::turn(tile.grads, grads, n, E, 1.f);
        tile.against(tile.of_scores, tile.values, tile.grads, E);
        by_vectors(tile, [&]<int V>() { pull<V>(tile, common, static_cast<float>(scale)); });

        for (int64_t j = 0; j < m; j++) tile.keys[j] = tile.of_scores.data() + j * TILE;
        for (int64_t j = 0; j < m; j++) tile.rows[j] = of_k[tile.seen.key[j]];
        rows_product(m, D, n, tile.keys.data(), queries.base, queries.stride, tile.rows.data(), true);
        const Rows keys = rows_of(k, b, h);
        for (int64_t j = 0; j < m; j++) tile.keys[j] = keys[tile.seen.key[j]];
        tile.out.assign(TILE * D, 0.f);
        for (int64_t j = 0; j < m; j += KEYS)
          columns_product(n, D, std::min<int64_t>(KEYS, m - j), tile.of_scores.data() + j * TILE,
                          TILE, tile.keys.data() + j, tile.out.data(), D, j > 0);
        for (int64_t i = 0; i < n; i++) std::copy_n(tile.out.data() + i * D, D, of_q[i]);
      }
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
