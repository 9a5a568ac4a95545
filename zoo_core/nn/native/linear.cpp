// Kernel attention with the features elu(x) + 1; see zoo_core/nn/kernels_in_parts.py, which computes
// the same by single operations.
//
// Tokens outermost and heads within, as hosts store them: what a thread reads lies together.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "rows.h"
#include "vectors.h"

namespace zoo {
namespace {

constexpr int64_t SOME = 32;  // tokens at once: their features and values fit L1

// elu(x) + 1; of NaN, NaN: comparisons with it give the second.
inline vec features(vec x) {
  return exp2(smaller(x, vec{}) * LOG2_E) + larger(vec{}, x);
}

// Where the tokens of a thread begin, of `length` that `parts` threads share.
inline int64_t border(int64_t length, int64_t part, int64_t parts) { return length * part / parts; }

// Runs f(sample, part, first token, last token + 1) for `parts` runs of tokens of each sample.
template <class F>
void over_parts(int64_t B, int64_t length, int64_t parts, F f) {
  at::parallel_for(0, B * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; u++)
      f(u / parts, u % parts, border(length, u % parts, parts), border(length, u % parts + 1, parts));
  });
}

// So many that every thread has work, and no part is tiny.
int64_t parts_for(int64_t B, int64_t length) {
  const int64_t wanted = (at::get_num_threads() + B - 1) / B;
  return std::max<int64_t>(1, std::min(wanted, length / SOME));
}

// What a thread works in: some tokens' features and pointers to rows.
struct Some {
  Buffer features, others, grads;
  std::vector<const float*> from, values;
  std::vector<float*> to;

  explicit Some(int64_t D, int64_t E) : features(SOME * D), others(SOME * D), grads(SOME * E) {}
};

// Lists the real ones of tokens first .. last - 1, SOME at most; gives where to go on.
int64_t list(std::vector<int64_t>& tokens, const bool* real, int64_t first, int64_t last) {
  tokens.clear();
  for (; first < last && static_cast<int64_t>(tokens.size()) < SOME; first++)
    if (!real || real[first]) tokens.push_back(first);
  return first;
}

// memory (D, E), total (D): sums over some tokens of phi(k) v^T and of phi(k).
void remember(Some& some, const std::vector<int64_t>& tokens, Rows k, Rows v, int64_t D, int64_t E,
              float* memory, float* total) {
  const int64_t n = static_cast<int64_t>(tokens.size());
  some.values.resize(n);
  for (int64_t i = 0; i < n; i++) {
    const float* key = k[tokens[i]];
    float* to = some.features.data() + i * D;
    for (int64_t d = 0; d < D; d += W) {
      const vec x = features(load(key + d));
      store(to + d, x), store(total + d, load(total + d) + x);
    }
    some.values[i] = v[tokens[i]];
  }
  columns_product(D, E, n, some.features.data(), D, some.values.data(), memory, E, true);
}

// Adds up the parts' sums, (B, parts, ...), in the first one of each sample.
void add_up(Buffer& sums, int64_t B, int64_t parts, int64_t size) {
  for (int64_t b = 0; b < B; b++)
    for (int64_t part = 1; part < parts; part++) {
      float *to = sums.data() + b * parts * size, *from = to + part * size;
      for (int64_t i = 0; i < size; i++) to[i] += from[i];
    }
}

// Writes the sums to memory (B, H, D, E + 1), the total last.
void pack(const Buffer& sums, int64_t parts, at::Tensor& memory) {
  const int64_t B = memory.size(0), H = memory.size(1), D = memory.size(2), E = memory.size(3) - 1;
  float* to = memory.data_ptr<float>();
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++) {
      const float* from = sums.data() + (b * parts * H + h) * D * (E + 1);
      for (int64_t d = 0; d < D; d++, to += E + 1) {
        std::copy_n(from + d * E, E, to);
        to[E] = from[D * E + d];
      }
    }
}

// Writes what n queries read of memory (D, E) and total (D): the results, and their weights.
void read(Some& some, Rows queries, Rows results, float* weight, int64_t n, const float* memory,
          const float* total, int64_t D, int64_t E) {
  some.from.resize(n), some.to.resize(n);
  for (int64_t i = 0; i < n; i++) {
    float* feature = some.features.data() + i * D;
    vec dot{};
    for (int64_t d = 0; d < D; d += W) {
      const vec x = features(load(queries[i] + d));
      store(feature + d, x), dot += x * load(total + d);
    }
    weight[i] = sum(dot);
    const float factor = weight[i] > NEGLIGIBLE ? 1 / weight[i] : 1;
    for (int64_t d = 0; d < D; d += W) store(feature + d, load(feature + d) * factor);
    some.from[i] = feature, some.to[i] = results[i];
  }
  rows_product(n, E, D, some.from.data(), memory, E, some.to.data(), false);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& real) {
  const int64_t B = q.size(0), H = q.size(1), L = q.size(2), D = q.size(3);
  const int64_t S = k.size(2), E = v.size(3), of_head = D * (E + 1), size = H * of_head;
  at::Tensor out = host_layout(q, E), total = at::empty({B, H, L, 1}, q.options());
  at::Tensor memory = at::empty({B, H, D, E + 1}, q.options());

  const int64_t parts = parts_for(B, S);
  Buffer sums(B * parts * size, 0.f);  // of a head: (D, E), then (D)
  over_parts(B, S, parts, [&](int64_t b, int64_t part, int64_t first, int64_t last) {
    Some some(D, E);
    std::vector<int64_t> tokens;
    while (first < last) {
      first = list(tokens, real_of(real, b), first, last);
      float* at = sums.data() + (b * parts + part) * size;
      for (int64_t h = 0; h < H; h++, at += of_head)
        remember(some, tokens, rows_of(k, b, h), rows_of(v, b, h), D, E, at, at + D * E);
    }
  });
  add_up(sums, B, parts, size);
  pack(sums, parts, memory);

  const int64_t runs = (L + SOME - 1) / SOME;
  over_parts(B, L, runs, [&](int64_t b, int64_t, int64_t first, int64_t last) {
    Some some(D, E);
    const float* at = sums.data() + b * parts * size;
    for (int64_t h = 0; h < H; h++, at += of_head)
      read(some, rows_of(q, b, h).from(first), rows_of(out, b, h).from(first),
           total.data_ptr<float>() + (b * H + h) * L + first, last - first, at, at + D * E, D, E);
  });
  return {out, total, memory};
}

// The gradients that one query leaves: writes that of its sums to `to`, and gives that of its total.
inline float pull_quotient(float* to, const float* grad, const float* out, float weight, int64_t E) {
  const bool divided = weight > NEGLIGIBLE;
  const float factor = divided ? 1 / weight : 1;
  vec dot{};
  for (int64_t e = 0; e < E; e += W) {
    const vec x = load(grad + e) * factor;
    store(to + e, x), dot += x * load(out + e);
  }
  return divided ? -sum(dot) : 0;
}

// to = of_feature times the slope of elu(x) + 1, which is min(feature, 1).
inline void pull_feature(float* to, const float* feature, const float* of_feature, int64_t D) {
  for (int64_t d = 0; d < D; d += W)
    store(to + d, smaller(load(feature + d), splat(1)) * load(of_feature + d));
}

// The queries, and what belongs to them, of one head, from the first of some tokens on.
struct Queries {
  Rows queries, grads, results, of_queries;
  const float* weight;
};

// Writes the gradients of n queries, and adds to those of memory (D, E) and total (D).
// turned: the memory, (E, D). total: of the features of keys.
void pull_queries(Some& some, const Queries& x, int64_t n, const float* turned, const float* total,
                  int64_t D, int64_t E, float* of_memory, float* of_total) {
  some.from.resize(n), some.to.resize(n), some.values.resize(n);
  for (int64_t i = 0; i < n; i++) {
    float *feature = some.features.data() + i * D, *of_feature = some.others.data() + i * D;
    float* of_sums = some.grads.data() + i * E;
    const vec end = splat(pull_quotient(of_sums, x.grads[i], x.results[i], x.weight[i], E));
    for (int64_t d = 0; d < D; d += W) {
      const vec now = features(load(x.queries[i] + d));
      store(feature + d, now), store(of_feature + d, end * load(total + d));
      store(of_total + d, load(of_total + d) + now * end);
    }
    some.from[i] = some.values[i] = of_sums, some.to[i] = of_feature;
  }
  columns_product(D, E, n, some.features.data(), D, some.values.data(), of_memory, E, true);
  rows_product(n, D, E, some.from.data(), turned, D, some.to.data(), true);
  for (int64_t i = 0; i < n; i++)
    pull_feature(x.of_queries[i], some.features.data() + i * D, some.to[i], D);
}

// Writes the gradients of some keys and values, from those of memory (D, E) and total (D).
// turned: that of the memory, (E, D).
void pull_keys(Some& some, const std::vector<int64_t>& tokens, Rows keys, Rows values, Rows of_keys,
               Rows of_values, const float* of_memory, const float* of_total, const float* turned,
               int64_t D, int64_t E) {
  const int64_t n = static_cast<int64_t>(tokens.size());
  some.from.resize(n), some.to.resize(n), some.values.resize(n);
  for (int64_t i = 0; i < n; i++) {
    float *feature = some.features.data() + i * D, *of_feature = some.others.data() + i * D;
    for (int64_t d = 0; d < D; d += W) {
      store(feature + d, features(load(keys[tokens[i]] + d)));
      store(of_feature + d, load(of_total + d));
    }
    some.from[i] = feature, some.values[i] = values[tokens[i]], some.to[i] = of_values[tokens[i]];
  }
  rows_product(n, E, D, some.from.data(), of_memory, E, some.to.data(), false);
  for (int64_t i = 0; i < n; i++) some.to[i] = some.others.data() + i * D;
  rows_product(n, D, E, some.values.data(), turned, D, some.to.data(), true);
  for (int64_t i = 0; i < n; i++) pull_feature(of_keys[tokens[i]], some.from[i], some.to[i], D);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& real, const at::Tensor& out, const at::Tensor& total,
    const at::Tensor& memory) {
  const int64_t B = q.size(0), H = q.size(1), L = q.size(2), D = q.size(3);
  const int64_t S = k.size(2), E = v.size(3), of_head = D * (E + 1), size = H * of_head;
  at::Tensor grad_q = host_layout(q, D);
  // Padding has no gradient.
  at::Tensor grad_k = host_layout(k, D), grad_v = host_layout(v, E);
  if (real) grad_k.zero_(), grad_v.zero_();

  const int64_t parts = parts_for(B, L);
  Buffer sums(B * parts * size, 0.f);  // of the memory and the total of each head
  over_parts(B, L, parts, [&](int64_t b, int64_t part, int64_t start, int64_t stop) {
    Some some(D, E);
    Buffer turned(H * E * D), totals(H * D);
    for (int64_t h = 0; h < H; h++) {
      const float* from = memory.data_ptr<float>() + (b * H + h) * of_head;
      turn(turned.data() + h * E * D, from, E + 1, D, E);
      for (int64_t d = 0; d < D; d++) totals[h * D + d] = from[d * (E + 1) + E];
    }
    for (int64_t first = start; first < stop; first += SOME)
      for (int64_t h = 0; h < H; h++) {
        const Queries own{
            rows_of(q, b, h).from(first), rows_of(grad, b, h).from(first),
            rows_of(out, b, h).from(first), rows_of(grad_q, b, h).from(first),
            total.data_ptr<float>() + (b * H + h) * L + first};
        float* of_memory = sums.data() + (b * parts + part) * size + h * of_head;
        pull_queries(some, own, std::min(SOME, stop - first), turned.data() + h * E * D,
                     totals.data() + h * D, D, E, of_memory, of_memory + D * E);
      }
  });
  add_up(sums, B, parts, size);

  over_parts(B, S, parts_for(B, S), [&](int64_t b, int64_t, int64_t first, int64_t last) {
    Some some(D, E);
    Buffer turned(H * E * D);
    std::vector<int64_t> tokens;
    const float* of_memory = sums.data() + b * parts * size;
    for (int64_t h = 0; h < H; h++)
      turn(turned.data() + h * E * D, of_memory + h * of_head, E, D, E);
    while (first < last) {
      first = list(tokens, real_of(real, b), first, last);
      for (int64_t h = 0; h < H; h++)
        pull_keys(some, tokens, rows_of(k, b, h), rows_of(v, b, h), rows_of(grad_k, b, h),
                  rows_of(grad_v, b, h), of_memory + h * of_head, of_memory + h * of_head + D * E,
                  turned.data() + h * E * D, D, E);
    }
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def("linear(Tensor q, Tensor k, Tensor v, Tensor? real) -> (Tensor, Tensor, Tensor)");
  library.def(
      "linear_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? real, Tensor out, "
      "Tensor total, Tensor memory) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("linear", &attend);
  library.impl("linear_backward", &attend_backward);
}

}  // namespace zoo
