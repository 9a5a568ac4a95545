// The delta rule of DPFP features, token by token; see zoo_core/nn/fast_weights.py, which computes
// it in chunks.
//
//     W_t = W_{t-1} + u_t k_t^T,   u_t = b_t e_t,   e_t = v_t - W_{t-1} k_t,   o_t = W_t q_t
//
// Chunks turn it into products of matrices, of which there are several times as many. Here W stays
// in the nearest cache, and of the features, which are made where they are needed, only those that
// are not zero cost anything. The rows of W know nothing of each other, so that some are taken at a
// time.

#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "dpfp.h"
#include "rows.h"
#include "vectors.h"

namespace zoo {
namespace {

constexpr int64_t AHEAD = 2;   // tokens
constexpr int64_t BLOCK = 32;  // tokens of one head, before those of the next: hosts store them so

// What a call is about, and how it goes.
struct Call {
  const at::Tensor &q, &k, &v, &b;
  const std::optional<at::Tensor>& real;
  int64_t nu, offset;  // keys before the first query
  bool both;           // ways: also from right to left, where what is read is halved

  const int64_t B = q.size(0), H = q.size(1), D = q.size(3), E = v.size(3);
  const int64_t N = offset + q.size(2), M = Features::count(D, nu);  // N: tokens that are seen
  const int64_t ways = both ? 2 : 1;
  const float share = both ? 0.5f : 1;

  // A tensor (B, H, ways, rows, E) for the backward, or nothing.
  at::Tensor kept(int64_t rows, bool keep) const {
    return at::empty({keep ? B : 0, H, ways, rows, E}, q.options());
  }
};

// Where the rows of one head begin in what is kept.
inline float* one_of(const at::Tensor& kept, int64_t s, int64_t h, int64_t way) {
  return kept.data_ptr<float>() + s * kept.stride(0) + h * kept.stride(1) + way * kept.stride(2);
}

// One head of one sample, its tokens in the order of one way.
struct Head {
  Rows queries, keys, values, strengths;
  const bool* real;
  int64_t N, offset, way;

  Head(const Call& x, int64_t s, int64_t h, int64_t way)
      : queries(rows_of(x.q, s, h).from(-x.offset)), keys(rows_of(x.k, s, h)),
        values(rows_of(x.v, s, h)), strengths(rows_of(x.b, s, h)),
        real(real_of(x.real, s)),
        N(x.N), offset(x.offset), way(way) {}

  int64_t token(int64_t step) const {
    step = std::clamp<int64_t>(step, 0, N - 1);
    return way ? N - 1 - step : step;
  }
  bool is_written(int64_t t) const { return !real || real[t]; }
  bool is_read(int64_t t) const { return t >= offset; }
};

// What a thread makes of a token.
struct Token {
  Features key, query;
  Buffer of_features;

  explicit Token(const Call& x)
      : key(x.D, x.nu, true), query(x.D, x.nu, true), of_features(x.D * x.nu + W) {}
};

// Goes over some tokens of a head, for V vectors of columns of values and results from one on.
// state: (M, V * W). errors: (N, E), or null.
template <int V>
void write_and_read(const Call& x, const Head& head, Token& token, int64_t start, int64_t stop,
                    int64_t at, Rows out, float* state, float* errors) {
  for (int64_t step = start; step < stop; step++) {
    const int64_t t = head.token(step), soon = head.token(step + AHEAD);
    fetch(head.keys[soon], x.D), fetch(head.values[soon] + at, V * W);
    fetch(head.queries[std::max(soon, x.offset)], x.D);
    if (head.is_written(t)) {
      token.key.read(head.keys[t]);
      const float factor = token.key.factor, strength = *head.strengths[t] * factor;
      vec error[V], added[V];
      gather<V>(token.key, state, error);
      ZOO_UNROLL for (int v = 0; v < V; v++) {
        error[v] = load(head.values[t] + at + W * v) - error[v] * factor;
        added[v] = error[v] * strength;
        if (errors) store(errors + t * x.E + at + W * v, error[v]);
      }
      scatter<V>(token.key, added, state);
    }
    if (!head.is_read(t)) continue;
    token.query.read(head.queries[t]);
    vec found[V];
    gather<V>(token.query, state, found);
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      float* to = out[t] + at + W * v;
      const vec mine = found[v] * (token.query.factor * x.share);
      store(to, head.way ? load(to) + mine : mine);
    }
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> rule(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& b,
    const std::optional<at::Tensor>& real, int64_t nu, int64_t offset, bool both, bool keep) {
  const Call x{q, k, v, b, real, nu, offset, both};
  const int64_t size = x.M * x.E;
  at::Tensor out = host_layout(q, x.E);
  // For the backward: what keys found missing, and W^T behind all tokens, some columns after others.
  at::Tensor errors = x.kept(x.N, keep), states = x.kept(x.M, keep);
  over_heads(x.B, x.H, [&](int64_t s, int64_t first, int64_t some) {
    Token token(x);
    Buffer own(some * size);
    for (int64_t way = 0; way < x.ways; way++) {
      std::fill(own.begin(), own.end(), 0.f);
      for (int64_t start = 0; start < x.N; start += BLOCK)
        for (int64_t h = first; h < first + some; h++) {
          const Head head(x, s, h, way);
          const Rows results = rows_of(out, s, h).from(-offset);
          float* state = own.data() + (h - first) * size;
          float* error = keep ? one_of(errors, s, h, way) : nullptr;
          over_columns(x.E, [&]<int V>(int64_t at) {
            write_and_read<V>(x, head, token, start, std::min(start + BLOCK, x.N), at, results,
                              state + x.M * at, error);
          });
        }
      if (keep)
        for (int64_t h = first; h < first + some; h++)
          std::copy_n(own.data() + (h - first) * size, size, one_of(states, s, h, way));
    }
  });
  return {out, errors, states};
}

// The gradients of one head.
struct Grads {
  Rows out, queries, keys, values, strengths;
};

// Goes back over what a query read: adds to the gradients of the query and of the state.
template <int V>
inline void back_over_query(Features& query, const vec* of_out, const float* state, float* of_state,
                            float* of_features, const float* x, float* of_x) {
  query.read(x);
  vec of_row[V];
  ZOO_UNROLL for (int v = 0; v < V; v++) of_row[v] = of_out[v] * query.factor;
  sums(query.size, of_features, [&](int64_t i) {
    const float by = query.by[i];
    const int64_t at = query.rows[i] * (V * W);
    vec dot{};
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      dot += load(state + at + W * v) * of_out[v];
      store(of_state + at + W * v, load(of_state + at + W * v) + by * of_row[v]);
    }
    return dot;
  });
  query.pull(of_features, x, of_x);
}

// Goes back over some tokens of a head, the last ones first, and adds to the gradients.
// state: (M, V * W) behind a token, then before it. of_state: the gradient of that.
template <int V>
void go_back(const Call& x, const Head& head, Token& token, int64_t start, int64_t stop, int64_t at,
             const Grads& of, const float* errors, float* state, float* of_state) {
  Features& key = token.key;
  for (int64_t step = stop - 1; step >= start; step--) {
    const int64_t t = head.token(step), soon = head.token(step - AHEAD);
    fetch(head.keys[soon], x.D), fetch(of.keys[soon], x.D);
    fetch(of.values[soon] + at, V * W);
    if (head.is_read(soon)) {
      fetch(head.queries[soon], x.D), fetch(of.queries[soon], x.D);
      fetch(of.out[soon] + at, V * W);
    }
    if (head.is_read(t)) {
      vec of_out[V];
      ZOO_UNROLL for (int v = 0; v < V; v++) of_out[v] = load(of.out[t] + at + W * v) * x.share;
      back_over_query<V>(token.query, of_out, state, of_state, token.of_features.data(),
                         head.queries[t], of.queries[t]);
    }
    if (!head.is_written(t)) continue;
    key.read(head.keys[t]);
    const float strength = *head.strengths[t], factor = key.factor;
    vec added[V], of_error[V], of_strength{};
    gather<V>(key, of_state, of_error);
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      const vec error = load(errors + t * x.E + at + W * v);
      of_strength += of_error[v] * factor * error;
      added[v] = strength * error, of_error[v] *= strength * factor;
      float* of_value = of.values[t] + at + W * v;
      store(of_value, load(of_value) + of_error[v]);
    }
    *of.strengths[t] += sum(of_strength);
    sums(key.size, token.of_features.data(), [&](int64_t i) {
      const float by = key.by[i] * factor;
      float *row = state + key.rows[i] * (V * W), *of_row = of_state + key.rows[i] * (V * W);
      vec dot{};
      ZOO_UNROLL for (int v = 0; v < V; v++) {
        const vec now = load(row + W * v) - by * added[v], of_now = load(of_row + W * v);
        dot += of_now * added[v] - now * of_error[v];
        store(row + W * v, now), store(of_row + W * v, of_now - by * of_error[v]);
      }
      return dot;
    });
    key.pull(token.of_features.data(), head.keys[t], of.keys[t]);
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> rule_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& b, const std::optional<at::Tensor>& real, const at::Tensor& errors,
    const at::Tensor& states, int64_t nu, int64_t offset, bool both) {
  const Call x{q, k, v, b, real, nu, offset, both};
  const int64_t size = x.M * x.E;
  at::Tensor grad_q = host_layout(q, x.D).zero_(), grad_k = host_layout(k, x.D).zero_();
  at::Tensor grad_v = host_layout(v, x.E).zero_(), grad_b = host_layout(b, 1).zero_();
  over_heads(x.B, x.H, [&](int64_t s, int64_t first, int64_t some) {
    Token token(x);
    Buffer own(some * size), of_own(some * size);
    for (int64_t way = 0; way < x.ways; way++) {
      for (int64_t h = first; h < first + some; h++)
        std::copy_n(one_of(states, s, h, way), size, own.data() + (h - first) * size);
      std::fill(of_own.begin(), of_own.end(), 0.f);
      for (int64_t stop = x.N; stop > 0; stop -= BLOCK)
        for (int64_t h = first; h < first + some; h++) {
          const Head head(x, s, h, way);
          const Grads of{rows_of(grad, s, h).from(-offset), rows_of(grad_q, s, h).from(-offset),
                         rows_of(grad_k, s, h), rows_of(grad_v, s, h), rows_of(grad_b, s, h)};
          over_columns(x.E, [&]<int V>(int64_t at) {
            const int64_t place = (h - first) * size + x.M * at;
            go_back<V>(x, head, token, std::max<int64_t>(stop - BLOCK, 0), stop, at, of,
                       one_of(errors, s, h, way), own.data() + place, of_own.data() + place);
          });
        }
    }
  });
  return {grad_q, grad_k, grad_v, grad_b};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def(
      "delta(Tensor q, Tensor k, Tensor v, Tensor b, Tensor? real, int nu, SymInt offset, bool both, "
      "bool keep) -> (Tensor, Tensor, Tensor)");
  library.def(
      "delta_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor b, Tensor? real, "
      "Tensor errors, Tensor states, int nu, SymInt offset, bool both) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("delta", &rule);
  library.impl("delta_backward", &rule_backward);
}

}  // namespace zoo
