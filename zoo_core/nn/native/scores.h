// The scores of some queries and keys, and the products that they take part in.
//
// Scores are kept with the queries side by side, (keys, lanes): a vector then holds the same key's
// scores of several queries, so that maxima and sums need no vector's own elements, and keys and
// values are read where they lie.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace zoo {

constexpr int TILE = 64;          // queries at once, at the most
constexpr int KEYS = 96;          // values that are mixed at once: they, and their weights, fit L1
constexpr float HIDDEN = -1e30f;  // the score of what is not seen

// Places for n queries side by side: a power of two of vectors.
inline int64_t lanes_for(int64_t n) {
  int64_t lanes = W;
  while (lanes < n) lanes *= 2;
  return lanes;
}

// Runs f<V>() for V vectors of queries.
template <int V = 1, class F>
void by_vectors(int64_t lanes, F f) {
  if constexpr (V * W < TILE) {
    if (lanes > V * W) return by_vectors<2 * V>(lanes, f);
  }
  f.template operator()<V>();
}

// What a thread works in. m: keys, n: queries.
struct Scores {
  int64_t lanes = 0;
  Buffer queries, grads;     // (width, lanes): of the queries, turned
  Buffer scores, of_scores;  // (m, lanes)
  Buffer out;                // (n, width)
  std::vector<const float*> keys, values, some;
  std::vector<float*> rows;
  const float* lines[TILE];

  void resize(int64_t m, int64_t n) {
    keys.resize(m), values.resize(m), some.resize(m), rows.resize(m);
    lanes = lanes_for(n);
  }

  // to (width, lanes) = factor * rows^T, of the n rows in `lines`.
  void turn(Buffer& to, int64_t n, int64_t width, float factor) {
    to.resize(width * lanes);
    turn_rows(to.data(), lanes, lines, n, width, factor);
  }

  // to (m, lanes) = a b, a by rows, b turned.
  void against(Buffer& to, const std::vector<const float*>& a, const Buffer& b, int64_t width) {
    const int64_t m = static_cast<int64_t>(a.size());
    to.resize(m * lanes);
    for (int64_t j = 0; j < m; j++) rows[j] = to.data() + j * lanes;
    rows_product(m, lanes, width, a.data(), b.data(), lanes, rows.data(), false);
  }

  // out (n, width) = a^T b, a (m, lanes), b by rows.
  void mix(const Buffer& a, const std::vector<const float*>& b, int64_t n, int64_t width) {
    const int64_t m = static_cast<int64_t>(b.size());
    if (m == 0) out.assign(n * width, 0.f);
    out.resize(n * width);
    for (int64_t j = 0; j < m; j += KEYS)
      columns_product(n, width, std::min<int64_t>(KEYS, m - j), a.data() + j * lanes, lanes,
                      b.data() + j, out.data(), width, j > 0);
  }

  // to (m, width) += a b, `to` by rows, a (m, lanes), b (n, width) with rows ldb apart.
  template <class To>
  void spread(To to, const Buffer& a, const float* b, int64_t ldb, int64_t n, int64_t width) {
    const int64_t m = static_cast<int64_t>(rows.size());
    for (int64_t j = 0; j < m; j++) some[j] = a.data() + j * lanes, rows[j] = to(j);
    rows_product(m, width, n, some.data(), b, ldb, rows.data(), true);
  }

  // Weights, in `scores`, to the gradients of scores, by those of weights, which are in of_scores.
  // common: of each query, what its output and the gradient of that have in common.
  template <int V>
  void pull(const vec* common, float scale) {
    for (float *row = scores.data(), *of_row = of_scores.data(), *end = row + scores.size();
         row < end; row += V * W, of_row += V * W)
      ZOO_UNROLL for (int v = 0; v < V; v++)
        store(of_row + W * v, load(row + W * v) * (load(of_row + W * v) - common[v]) * scale);
  }
};

}  // namespace zoo
