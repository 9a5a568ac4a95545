// The DPFP features of a token, zoo_core/nn/feature_maps.py, as those few that are not zero, and
// what they do with the rows of a matrix that has one for each feature.
//
// Rolled by s places, numbers x make two features at each place, of which at most one is not zero:
// relu(x_i) relu(y) and relu(-x_i) relu(-y), where y = x_{i-s}, or -x_{i-s+D} if i < s. The gradient
// of x needs that of no other feature, since they stay zero nearby, or have a factor that is.
#pragma once

#include <algorithm>
#include <vector>

#include "rows.h"
#include "vectors.h"

namespace zoo {

class Features {
 public:
  int64_t size = 0;           // of those that are not zero
  float factor = 1;           // of all of them: so that they sum to 1, or none
  Buffer by;                  // the features
  std::vector<int32_t> rows;  // which ones they are: twice the place, and 1 more for the negative

  // nu: how many rolls. shares: whether a token's features are to sum to 1.
  Features(int64_t D, int64_t nu, bool shares)
      : by(D * nu + W), rows(D * nu + W), D(D), nu(nu), shares(shares), of_places(D * nu) {}

  static int64_t count(int64_t D, int64_t nu) { return 2 * D * nu; }

  // Makes the features of x (D).
  void read(const float* x) {
    size = 0;
    vec total{};
    over_rolls([&]<int S>() { total += products<S>(x); });
    store(by.data() + size, vec{});  // whole vectors of them are read
    if (!shares) return;
    const float all = sum(total);
    divided = all > NEGLIGIBLE;
    factor = divided ? 1 / all : 1;
  }

  // Adds to of_x (D) what the gradients `of`, whole vectors, of features times factor say of x.
  void pull(const float* of, const float* x, float* of_x) {
    const float times = factor, common = divided ? dot(of, by.data(), size) * times : 0;
    float* of_place = of_places.data();
    std::fill(of_places.begin(), of_places.end(), 0.f);
    for (int64_t i = 0; i < size; i++) of_place[rows[i] >> 1] = (of[i] - common) * times;
    over_rolls([&]<int S>() { pull_products<S>(of_place + (S - 1) * D, x, of_x); });
  }

 private:
  int64_t D, nu;
  bool shares, divided = false;
  Buffer of_places;

  template <class F>
  void over_rolls(F f) {
    f.template operator()<1>();
    if (nu > 1) f.template operator()<2>();
    if (nu > 2) f.template operator()<3>();
  }

  // Numbers S places before, and behind, those of two neighbours.
  template <int S, int... L>
  static vec before(vec last, vec now, std::integer_sequence<int, L...>) {
    return pick(last, now, std::integer_sequence<int, W - S + L...>{});
  }
  template <int S, int... L>
  static vec behind(vec now, vec next, std::integer_sequence<int, L...>) {
    return pick(now, next, std::integer_sequence<int, S + L...>{});
  }
  using Lanes = std::make_integer_sequence<int, W>;

  // Appends the features by one roll; gives their sum.
  template <int S>
  vec products(const float* x) {
    vec total{}, last = -load(x + D - W);
    for (int64_t i = 0; i < D; i += W) {
      const vec now = load(x + i), other = before<S>(last, now, Lanes{});
      const vec product = larger(vec{}, now) * larger(vec{}, other) +
                          larger(vec{}, -now) * larger(vec{}, -other);  // NaN stays NaN
      const int32_t first = 2 * static_cast<int32_t>((S - 1) * D + i);
      size += pack(product, 2 * lanes() + first - (now < 0), by.data() + size, rows.data() + size);
      total += product, last = now;
    }
    return total;
  }

  // of: gradients of the products at the D places.
  template <int S>
  void pull_products(const float* of, const float* x, float* of_x) {
    vec last = -load(x + D - W), now = load(x), of_now = load(of);
    const vec of_end = -(of_now * now);
    for (int64_t i = 0; i < D; i += W) {
      const bool more = i + W < D;
      const vec next = more ? load(x + i + W) : vec{}, of_next = more ? load(of + i + W) : vec{};
      const vec behind_now = behind<S>(of_now * now, more ? of_next * next : of_end, Lanes{});
      store(of_x + i, load(of_x + i) + of_now * before<S>(last, now, Lanes{}) + behind_now);
      last = now, now = next, of_now = of_next;
    }
  }
};

// to = sum of the features' rows of w (., V * W), each times its feature, but for the factor.
template <int V>
inline void gather(const Features& x, const float* w, vec* to) {
  const float* by = x.by.data();
  const int32_t* rows = x.rows.data();
  vec one[V] = {}, two[V] = {};  // two sums: each waits for its last addition
  int64_t i = 0;
  for (; i + 2 <= x.size; i += 2) {
    const float x_a = by[i], x_b = by[i + 1];
    const float *a = w + rows[i] * (V * W), *b = w + rows[i + 1] * (V * W);
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      one[v] += x_a * load(a + W * v);
      two[v] += x_b * load(b + W * v);
    }
  }
  if (i < x.size)
    ZOO_UNROLL for (int v = 0; v < V; v++) one[v] += by[i] * load(w + rows[i] * (V * W) + W * v);
  ZOO_UNROLL for (int v = 0; v < V; v++) to[v] = one[v] + two[v];
}

// The features' rows of w (., V * W) += x, each time times its feature, but for the factor.
template <int V>
inline void scatter(const Features& some, const vec* x, float* w) {
  const float* by = some.by.data();
  const int32_t* rows = some.rows.data();
  for (int64_t i = 0; i < some.size; i++) {
    const float number = by[i];
    float* row = w + rows[i] * (V * W);
    ZOO_UNROLL for (int v = 0; v < V; v++) store(row + W * v, load(row + W * v) + number * x[v]);
  }
}

// to[i] = the sum of the vector f(i), for i < n and zeros for whole vectors of results.
template <class F>
inline void sums(int64_t n, float* to, F f) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t some = n - i < W ? n - i : W;
    vec x[W];
    for (int64_t j = 0; j < some; j++) x[j] = f(i + j);
    for (int64_t j = some; j < W; j++) x[j] = vec{};
    store(to + i, sums_of(x));
  }
}

}  // namespace zoo
