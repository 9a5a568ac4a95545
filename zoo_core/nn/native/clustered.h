// What the kernels of clustered attention share: the tokens of a head, cluster by cluster.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "rows.h"
#include "scores.h"
#include "vectors.h"

namespace zoo {

// The real tokens of a head, cluster by cluster.
struct Members {
  std::vector<int64_t> start, order;

  Members(const int64_t* index, const std::vector<int64_t>& tokens, int64_t number)
      : start(number + 1), order(tokens.size()) {
    for (const int64_t i : tokens) {
      TORCH_CHECK(0 <= index[i] && index[i] < number, "cluster ", index[i], " of ", number);
      start[index[i] + 1]++;
    }
    for (int64_t c = 0; c < number; c++) start[c + 1] += start[c];
    std::vector<int64_t> next = start;
    for (const int64_t i : tokens) order[next[index[i]]++] = i;
  }
  int64_t size(int64_t c) const { return start[c + 1] - start[c]; }

  // Runs f(first of some members, how many) for all of cluster c, in parts that fill their lanes.
  template <class F>
  void parts(int64_t c, F f) const {
    const int64_t* at = order.data() + start[c];
    for (int64_t left = size(c), n; left > 0; left -= n, at += n) {
      n = std::min<int64_t>(left, TILE);
      if (const int64_t half = lanes_for(n) / 2; half >= W && n <= half + half / 2) n = half;
      f(at, n);
    }
  }
};

// What is the same for all heads, and where the clusters of each lie.
struct Call {
  const at::Tensor &q, &k, &v, &index, &means;
  std::optional<at::Tensor> real;
  int64_t H, N, D, E, C, T;
  float scale, unit;

  Call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& index,
       const at::Tensor& means, const std::optional<at::Tensor>& real, int64_t topk, double scale)
      : q(q), k(k), v(v), index(index), means(means), real(real),
        H(q.size(1)), N(q.size(2)), D(q.size(3)), E(v.size(3)), C(means.size(2)), T(topk),
        scale(static_cast<float>(scale)), unit(this->scale * LOG2_E) {
    const int64_t B = q.size(0);
    const std::vector<int64_t> tokens{B, H, N}, clusters{B, H, C, D};
    TORCH_CHECK(k.sizes() == q.sizes() && v.sizes().slice(0, 3) == tokens, "keys of other tokens");
    TORCH_CHECK(index.sizes() == tokens && means.sizes() == clusters, "clusters of other tokens");
    TORCH_CHECK(index.is_contiguous() && means.is_contiguous(), "clusters in other layouts");
    TORCH_CHECK(0 <= T && T <= N, T, " top keys of ", N);
  }

  template <class F>
  void over_heads(F f) const {
    at::parallel_for(0, q.size(0) * H, 1, [&](int64_t begin, int64_t end) {
      for (int64_t u = begin; u < end; u++) {
        const std::vector<int64_t> tokens = real_tokens(real, u / H, N);
        if (!tokens.empty()) f(u, tokens);
      }
    });
  }
};

// What the forward pass hands over: of each cluster its top keys, by rank among the real ones and in
// their order, the share of its weights that these have, what the others give, and the log to base 2
// of its denominator; and that of each query among the top keys.
struct Kept {
  at::Tensor top, share, rest, mass, own;
};

// One head.
struct Head : Scores {
  const Call& x;
  Rows q, k, v;
  const std::vector<int64_t>& tokens;
  Members members;
  int64_t T;  // top keys, of a sample with few keys all
  const float* means;
  int32_t* top;
  float *share, *rest, *mass, *own;

  Head(const Call& x, const Kept& kept, int64_t u, const std::vector<int64_t>& tokens)
      : x(x),
        q(rows_of(x.q, u / x.H, u % x.H)),
        k(rows_of(x.k, u / x.H, u % x.H)),
        v(rows_of(x.v, u / x.H, u % x.H)),
        tokens(tokens),
        members(x.index.data_ptr<int64_t>() + u * x.N, tokens, x.C),
        T(std::min(x.T, static_cast<int64_t>(tokens.size()))),
        means(x.means.data_ptr<float>() + u * x.C * x.D),
        top(kept.top.data_ptr<int32_t>() + u * x.C * x.T),
        share(kept.share.data_ptr<float>() + u * x.C),
        rest(kept.rest.data_ptr<float>() + u * x.C * x.E),
        mass(kept.mass.data_ptr<float>() + u * x.C),
        own(kept.own.data_ptr<float>() + u * x.N) {}

  // Runs f(first cluster, how many) for tiles of clusters, whose means stand turned in `queries`.
  template <class F>
  void over_clusters(F f) {
    for (int64_t c = 0; c < x.C; c += TILE) {
      const int64_t n = std::min<int64_t>(TILE, x.C - c);
      lanes = lanes_for(n);
      for (int64_t i = 0; i < n; i++) lines[i] = means + (c + i) * x.D;
      turn(queries, n, x.D, x.unit);
      f(c, n);
    }
  }

  // Keys and values are those of tokens first .. first + m - 1.
  void see_all(int64_t first, int64_t m) {
    keys.resize(m), values.resize(m), some.resize(m), rows.resize(m);
    for (int64_t j = 0; j < m; j++)
      keys[j] = k[tokens[first + j]], values[j] = v[tokens[first + j]];
  }

  // Keys and values are the top ones of cluster c.
  void see_top(int64_t c) {
    keys.resize(T), values.resize(T), some.resize(T), rows.resize(T);
    for (int64_t j = 0; j < T; j++) {
      const int64_t rank = top[c * x.T + j];
      TORCH_CHECK(0 <= rank && rank < static_cast<int64_t>(tokens.size()), "top key ", rank);
      keys[j] = k[tokens[rank]], values[j] = v[tokens[rank]];
    }
  }

  // The scores of n queries and the keys.
  void score(const int64_t* at, int64_t n) {
    lanes = lanes_for(n);
    for (int64_t i = 0; i < n; i++) lines[i] = q[at[i]];
    turn(queries, n, x.D, x.unit);
    const int64_t* next = at + n;
    const int64_t* end = members.order.data() + members.order.size();
    for (int64_t i = 0; i < n && next < end; i++) fetch(q[*next++], x.D);
    against(scores, keys, queries, x.D);
  }

  // The scores of the clusters of a tile and all keys.
  void score_all() {
    constexpr int64_t step = 24;  // keys at once, while the next are fetched
    const int64_t m = static_cast<int64_t>(keys.size());
    scores.resize(m * lanes);
    for (int64_t j = 0; j < m; j++) rows[j] = scores.data() + j * lanes;
    for (int64_t j = 0; j < m; j += step) {
      for (int64_t i = j + step; i < std::min(j + 2 * step, m); i++) fetch(keys[i], x.D);
      rows_product(std::min(step, m - j), lanes, x.D, keys.data() + j, queries.data(), lanes,
                   rows.data() + j, false);
    }
  }
};

}  // namespace zoo
