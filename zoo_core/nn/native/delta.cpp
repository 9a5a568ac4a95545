// The delta rule, token by token; see zoo_core/nn/fast_weights.py, which computes it in chunks.
//
//     W_t = W_{t-1} + u_t k_t^T,   u_t = b_t e_t,   e_t = v_t - W_{t-1} k_t,   o_t = W_t q_t
//
// Chunks turn it into products of matrices, of which there are several times as many. Here W stays
// in the nearest cache, and features that are zero, as most of DPFP are, cost nothing forward. The
// rows of W know nothing of each other, so that the backward takes some at a time.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "rows.h"
#include "vectors.h"

namespace zoo {
namespace {

constexpr int64_t AHEAD = 2;  // tokens

// Some rows of a matrix, by the numbers to multiply them with: those that are not zero.
struct Sparse {
  std::vector<int64_t> row;
  std::vector<float> by;
  int64_t size = 0;

  explicit Sparse(int64_t width) : row(width), by(width) {}
  void read(const float* x, int64_t width) {
    int64_t n = 0, *rows = row.data();
    float* numbers = by.data();
    for (int64_t i = 0; i < width; i++) {  // which are zero cannot be foretold: no branch
      uint32_t bits;
      std::memcpy(&bits, x + i, sizeof bits);
      rows[n] = i, numbers[n] = x[i];
      n += (bits << 1) != 0;  // but for the sign
    }
    size = n;
  }
};

// to (width) = sum of those rows of w (., width), each times its number.
void gather(const Sparse& some, const float* w, int64_t width, float* to) {
  over_columns(width, [&]<int V>(int64_t at) {
    vec one[V] = {}, two[V] = {};  // two sums: each waits for its last addition
    int64_t i = 0;
    for (; i + 2 <= some.size; i += 2) {
      const float *a = w + some.row[i] * width + at, *b = w + some.row[i + 1] * width + at;
      ZOO_UNROLL for (int v = 0; v < V; v++) {
        one[v] += some.by[i] * load(a + W * v);
        two[v] += some.by[i + 1] * load(b + W * v);
      }
    }
    if (i < some.size)
      ZOO_UNROLL for (int v = 0; v < V; v++)
        one[v] += some.by[i] * load(w + some.row[i] * width + at + W * v);
    ZOO_UNROLL for (int v = 0; v < V; v++) store(to + at + W * v, one[v] + two[v]);
  });
}

// w's rows += each one's number times x (width), times sign.
void scatter(const Sparse& some, const float* x, float sign, float* w, int64_t width) {
  over_columns(width, [&]<int V>(int64_t at) {
    vec held[V];
    ZOO_UNROLL for (int v = 0; v < V; v++) held[v] = sign * load(x + at + W * v);
    for (int64_t i = 0; i < some.size; i++) {
      float* row = w + some.row[i] * width + at;
      ZOO_UNROLL for (int v = 0; v < V; v++)
        store(row + W * v, load(row + W * v) + some.by[i] * held[v]);
    }
  });
}

// Asks for a row that comes soon: tokens lie so far apart that nothing else foresees it.
inline void expect(const float* row, int64_t width) {
  for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(row + i);
}

// The token that comes at a step, in the one direction or the other.
inline int64_t token(int64_t step, int64_t N, bool backwards) {
  return backwards ? N - 1 - step : step;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> rule(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& b,
    bool backwards) {
  const int64_t B = q.size(0), H = q.size(1), N = q.size(2), M = q.size(3), E = v.size(3);
  at::Tensor out = host_layout(q, E), errors = at::empty({B, H, N, E}, q.options());
  at::Tensor states = at::zeros({B, H, M, E}, q.options());  // W^T behind all tokens
  at::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    Buffer added(E);
    Sparse key(M), query(M);
    for (int64_t u = begin; u < end; u++) {
      const Rows queries = rows_of(q, u / H, u % H), keys = rows_of(k, u / H, u % H);
      const Rows values = rows_of(v, u / H, u % H), strengths = rows_of(b, u / H, u % H);
      const Rows results = rows_of(out, u / H, u % H), of_error = rows_of(errors, u / H, u % H);
      float* state = states.data_ptr<float>() + u * M * E;
      for (int64_t step = 0; step < N; step++) {
        const int64_t t = token(step, N, backwards);
        const int64_t soon = token(std::min(step + AHEAD, N - 1), N, backwards);
        expect(keys[soon], M), expect(queries[soon], M), expect(values[soon], E);
        key.read(keys[t], M), query.read(queries[t], M);
        float* error = of_error[t];
        gather(key, state, E, error);
        for (int64_t e = 0; e < E; e += W) {
          const vec x = load(values[t] + e) - load(error + e);
          store(error + e, x), store(added.data() + e, x * *strengths[t]);
        }
        scatter(key, added.data(), 1, state, E);
        gather(query, state, E, results[t]);
      }
    }
  });
  return {out, errors, states};
}

constexpr int64_t SOME = 16;  // rows of W at once: they and their gradients fit L1

// One row of W goes back over a token, and its gradient with it.
//
// row: of W behind the token, then before it. of_row: the gradient of that. Adds to the gradients of
// query and key what this row has to say; gives that of what was added to the row.
template <int V>
inline float back(float* row, float* of_row, const float* query, const float* key, float added,
                  float of_out, float strength, float* of_query, float* of_key, int64_t M) {
  vec dot[V] = {};
  for (int64_t m = 0; m < M; m += V * W)
    ZOO_UNROLL for (int i = 0; i < V; i++) {
      const int64_t at = m + W * i;
      const vec k = load(key + at), now = load(row + at);
      const vec of_now = load(of_row + at) + of_out * load(query + at);
      store(of_query + at, load(of_query + at) + of_out * now);
      store(of_key + at, load(of_key + at) + added * of_now);
      store(row + at, now - added * k);
      store(of_row + at, of_now);
      dot[i] += of_now * k;
    }
  ZOO_UNROLL for (int i = 1; i < V; i++) dot[0] += dot[i];
  const float of_added = sum(dot[0]), of_error = strength * of_added;
  for (int64_t m = 0; m < M; m += W) {
    store(of_key + m, load(of_key + m) - of_error * load(row + m));
    store(of_row + m, load(of_row + m) - of_error * load(key + m));
  }
  return of_added;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> rule_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& b, const at::Tensor& errors, const at::Tensor& states, bool backwards) {
  const int64_t B = q.size(0), H = q.size(1), N = q.size(2), M = q.size(3), E = v.size(3);
  at::Tensor grad_q = host_layout(q, M).zero_(), grad_k = host_layout(k, M).zero_();
  at::Tensor grad_v = host_layout(v, E), grad_b = host_layout(b, 1).zero_();
  at::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    Buffer state(SOME * M), of_state(SOME * M);
    std::vector<const float*> rows(M);
    for (int64_t u = begin; u < end; u++) {
      const int64_t s = u / H, h = u % H;
      const Rows queries = rows_of(q, s, h), keys = rows_of(k, s, h), strengths = rows_of(b, s, h);
      const Rows of_error = rows_of(errors, s, h), grads = rows_of(grad, s, h);
      const Rows of_q = rows_of(grad_q, s, h), of_k = rows_of(grad_k, s, h);
      const Rows of_v = rows_of(grad_v, s, h), of_b = rows_of(grad_b, s, h);
      const float* last = states.data_ptr<float>() + u * M * E;
      for (int64_t first = 0; first < E; first += SOME) {
        const int64_t some = std::min(SOME, E - first);
        for (int64_t m = 0; m < M; m++) rows[m] = last + m * E + first;
        turn_rows(state.data(), M, rows.data(), M, some, 1.f);
        std::fill(of_state.begin(), of_state.end(), 0.f);
        for (int64_t step = N - 1; step >= 0; step--) {
          const int64_t t = token(step, N, backwards);
          const int64_t soon = token(std::max<int64_t>(step - AHEAD, 0), N, backwards);
          expect(keys[soon], M), expect(queries[soon], M);
          expect(of_k[soon], M), expect(of_q[soon], M);
          expect(of_error[soon] + first, some), expect(grads[soon] + first, some);
          const float strength = *strengths[t], *error = of_error[t] + first;
          const float* of_out = grads[t] + first;
          float *value = of_v[t] + first, of_strength = 0;
          for (int64_t e = 0; e < some; e++) {
            const float of_added = back<2>(
                state.data() + e * M, of_state.data() + e * M, queries[t], keys[t],
                strength * error[e], of_out[e], strength, of_q[t], of_k[t], M);
            value[e] = strength * of_added, of_strength += of_added * error[e];
          }
          *of_b[t] += of_strength;
        }
      }
    }
  });
  return {grad_q, grad_k, grad_v, grad_b};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def(
      "delta(Tensor q, Tensor k, Tensor v, Tensor b, bool backwards) "
      "-> (Tensor, Tensor, Tensor)");
  library.def(
      "delta_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor b, Tensor errors, "
      "Tensor states, bool backwards) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("delta", &rule);
  library.impl("delta_backward", &rule_backward);
}

}  // namespace zoo
