// Kernel attention with DPFP features; see zoo_core/nn/kernels_in_parts.py, which computes the same
// by single operations.
//
// Token by token: of the features only those that are not zero cost anything. The columns of values
// know nothing of each other, so that some are taken at a time.

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
  const at::Tensor &q, &k, &v;
  const std::optional<at::Tensor>& real;
  int64_t nu;

  const int64_t B = q.size(0), H = q.size(1), L = q.size(2), S = k.size(2);
  const int64_t D = q.size(3), E = v.size(3), M = Features::count(D, nu);
  const int64_t size = M * (E + 1);  // of a memory: of some columns after others, then the total

  bool is_real(int64_t s, int64_t t) const {
    return !real || real_of(real, s)[t];
  }

  // Runs f(head, memory, first token, last token + 1) for blocks of tokens and some heads.
  template <class F>
  void over_blocks(int64_t length, int64_t first, int64_t heads, float* memories, F f) const {
    for (int64_t start = 0; start < length; start += BLOCK)
      for (int64_t h = 0; h < heads; h++)
        f(first + h, memories + h * size, start, std::min(start + BLOCK, length));
  }
};

inline float* of_head(const at::Tensor& x, int64_t s, int64_t h) {
  return x.data_ptr<float>() + s * x.stride(0) + h * x.stride(1);
}

// memory (M, V * W) += phi(k) v^T, total (M) += phi(k); no total if it is null.
template <int V>
void remember(Features& key, const float* k, const float* v, float* memory, float* total) {
  key.read(k);
  vec value[V];
  ZOO_UNROLL for (int i = 0; i < V; i++) value[i] = load(v + W * i);
  scatter<V>(key, value, memory);
  if (total)
    for (int64_t i = 0; i < key.size; i++) total[key.rows[i]] += key.by[i];
}

// The weight of a query, which is phi(q) total.
inline float weigh(const Features& query, const float* total) {
  const float* by = query.by.data();
  const int32_t* rows = query.rows.data();
  float weights[4] = {};  // several sums: each waits for its last addition
  int64_t i = 0;
  for (; i + 4 <= query.size; i += 4)
    ZOO_UNROLL for (int j = 0; j < 4; j++) weights[j] += by[i + j] * total[rows[i + j]];
  for (; i < query.size; i++) weights[0] += by[i] * total[rows[i]];
  return (weights[0] + weights[1]) + (weights[2] + weights[3]);
}

// Writes what a query reads of a memory, and gives its weight.
template <int V>
float read(Features& query, const float* q, const float* memory, const float* total, float* out) {
  query.read(q);
  const float weight = weigh(query, total), factor = weight > NEGLIGIBLE ? 1 / weight : 1;
  vec found[V];
  gather<V>(query, memory, found);
  ZOO_UNROLL for (int i = 0; i < V; i++) store(out + W * i, found[i] * factor);
  return weight;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& real, int64_t nu) {
  const Call x{q, k, v, real, nu};
  at::Tensor out = host_layout(q, x.E), weights = at::empty({x.B, x.H, x.L, 1}, q.options());
  at::Tensor memory = at::zeros({x.B, x.H, x.size}, q.options());
  over_heads(x.B, x.H, [&](int64_t s, int64_t first, int64_t heads) {
    Features token(x.D, nu, false);
    float* memories = of_head(memory, s, first);
    x.over_blocks(x.S, first, heads, memories, [&](int64_t h, float* own, int64_t from, int64_t to) {
      const Rows keys = rows_of(k, s, h), values = rows_of(v, s, h);
      over_columns(x.E, [&]<int V>(int64_t at) {
        for (int64_t t = from; t < to; t++) {
          const int64_t soon = std::min(t + AHEAD, x.S - 1);
          fetch(keys[soon], x.D), fetch(values[soon] + at, V * W);
          if (x.is_real(s, t))
            remember<V>(token, keys[t], values[t] + at, own + x.M * at,
                        at ? nullptr : own + x.M * x.E);
        }
      });
    });
    x.over_blocks(x.L, first, heads, memories, [&](int64_t h, float* own, int64_t from, int64_t to) {
      const Rows queries = rows_of(q, s, h), results = rows_of(out, s, h);
      over_columns(x.E, [&]<int V>(int64_t at) {
        for (int64_t t = from; t < to; t++) {
          fetch(queries[std::min(t + AHEAD, x.L - 1)], x.D);
          of_head(weights, s, h)[t] = read<V>(token, queries[t], own + x.M * at, own + x.M * x.E,
                                              results[t] + at);
        }
      });
    });
  });
  return {out, weights, memory};
}

// What a thread needs to go back over a token.
struct Back {
  Features token;
  Buffer of_features;
  explicit Back(const Call& x) : token(x.D, x.nu, false), of_features(x.D * x.nu + W) {}
};

// Of one query. x, of_x: it and its gradient. out, grad: what it gave, all of it, and the gradient.
struct Query {
  const float *x, *out, *grad;
  float weight, *of_x;
};

// Adds to the gradients of a query, and of memory (M, V * W) and total (M) what it reads, in some
// columns from one on; of the total only in the first ones.
template <int V>
void pull_query(Back& back, const Query& query, int64_t E, int64_t at, const float* memory,
                const float* total, float* of_memory, float* of_total) {
  Features& features = back.token;
  const bool divided = query.weight > NEGLIGIBLE;
  const float factor = divided ? 1 / query.weight : 1;
  const float of_weight = divided && at == 0 ? -factor * dot(query.grad, query.out, E) : 0;
  vec of_sums[V];
  ZOO_UNROLL for (int v = 0; v < V; v++) of_sums[v] = load(query.grad + at + W * v) * factor;
  features.read(query.x);
  sums(features.size, back.of_features.data(), [&](int64_t i) {
    const float by = features.by[i];
    const int64_t row = features.rows[i];
    const float* own = memory + row * (V * W);
    float* of_own = of_memory + row * (V * W);
    vec found{total[row] * of_weight};  // in its first place: they are summed
    of_total[row] += by * of_weight;
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      found += load(own + W * v) * of_sums[v];
      store(of_own + W * v, load(of_own + W * v) + by * of_sums[v]);
    }
    return found;
  });
  features.pull(back.of_features.data(), query.x, query.of_x);
}

// Writes the gradient of some columns of a value, and adds to that of its key.
template <int V>
void pull_key(Back& back, const float* k, const float* v, const float* of_memory,
              const float* of_total, bool first, float* of_k, float* of_v) {
  Features& features = back.token;
  features.read(k);
  vec value[V], of_value[V];
  gather<V>(features, of_memory, of_value);
  ZOO_UNROLL for (int i = 0; i < V; i++) value[i] = load(v + W * i), store(of_v + W * i, of_value[i]);
  sums(features.size, back.of_features.data(), [&](int64_t i) {
    const int64_t row = features.rows[i];
    vec found{first ? of_total[row] : 0};
    ZOO_UNROLL for (int j = 0; j < V; j++) found += load(of_memory + row * (V * W) + W * j) * value[j];
    return found;
  });
  features.pull(back.of_features.data(), k, of_k);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& real, const at::Tensor& out, const at::Tensor& weights,
    const at::Tensor& memory, int64_t nu) {
  const Call x{q, k, v, real, nu};
  at::Tensor grad_q = host_layout(q, x.D).zero_(), grad_k = host_layout(k, x.D).zero_();
  at::Tensor grad_v = host_layout(v, x.E);
  if (real) grad_v.zero_();  // padding has no gradient
  over_heads(x.B, x.H, [&](int64_t s, int64_t first, int64_t heads) {
    Back back(x);
    Buffer of_memories(heads * x.size, 0.f);
    x.over_blocks(x.L, first, heads, of_memories.data(),
                  [&](int64_t h, float* of_own, int64_t from, int64_t to) {
      const Rows queries = rows_of(q, s, h), results = rows_of(out, s, h);
      const Rows grads = rows_of(grad, s, h), of_queries = rows_of(grad_q, s, h);
      const float *own = of_head(memory, s, h), *weight = of_head(weights, s, h);
      over_columns(x.E, [&]<int V>(int64_t at) {
        for (int64_t t = from; t < to; t++) {
          const int64_t soon = std::min(t + AHEAD, x.L - 1);
          fetch(queries[soon], x.D), fetch(of_queries[soon], x.D);
          fetch(results[soon], x.E), fetch(grads[soon], x.E);
          const Query query{queries[t], results[t], grads[t], weight[t], of_queries[t]};
          pull_query<V>(back, query, x.E, at, own + x.M * at, own + x.M * x.E, of_own + x.M * at,
                        of_own + x.M * x.E);
        }
      });
    });
    x.over_blocks(x.S, first, heads, of_memories.data(),
                  [&](int64_t h, float* of_own, int64_t from, int64_t to) {
      const Rows keys = rows_of(k, s, h), values = rows_of(v, s, h);
      const Rows of_keys = rows_of(grad_k, s, h), of_values = rows_of(grad_v, s, h);
      over_columns(x.E, [&]<int V>(int64_t at) {
        for (int64_t t = from; t < to; t++) {
          const int64_t soon = std::min(t + AHEAD, x.S - 1);
          fetch(keys[soon], x.D), fetch(of_keys[soon], x.D), fetch(values[soon] + at, V * W);
          if (x.is_real(s, t))
            pull_key<V>(back, keys[t], values[t] + at, of_own + x.M * at, of_own + x.M * x.E,
                        at == 0, of_keys[t], of_values[t] + at);
        }
      });
    });
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def("dpfp(Tensor q, Tensor k, Tensor v, Tensor? real, int nu) -> (Tensor, Tensor, Tensor)");
  library.def(
      "dpfp_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? real, Tensor out, "
      "Tensor total, Tensor memory, int nu) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("dpfp", &attend);
  library.impl("dpfp_backward", &attend_backward);
}

}  // namespace zoo
