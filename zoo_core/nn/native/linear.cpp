// Kernel attention with the features elu(x) + 1; see zoo_core/nn/kernels_in_parts.py, which computes
// the same by single operations.
//
// Tokens outermost and heads within, as hosts store them: what a thread reads lies together.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "rows.h"
#include "vectors.h"

namespace zoo {
namespace {

constexpr int64_t SOME = 32;  // tokens at once: their features and values fit L1

// The total weight that counts as zero, as in zoo_core/nn/precision.py.
constexpr float NEGLIGIBLE =
    std::numeric_limits<float>::min() / std::numeric_limits<float>::epsilon();

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

const bool* real_of(const std::optional<at::Tensor>& real, int64_t b) {
  return real ? real->data_ptr<bool>() + b * real->stride(0) : nullptr;
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

// Writes the sums to memory (B, H, D, E + 1), the total last; and back.
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

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& real) {
  const int64_t B = q.size(0), H = q.size(1), L = q.size(2), D = q.size(3);
  const int64_t S = k.size(2), E = v.size(3), size = H * D * (E + 1);
  at::Tensor out = host_layout(q, E), total = at::empty({B, H, L, 1}, q.options());
  at::Tensor memory = at::empty({B, H, D, E + 1}, q.options());

  int64_t parts = parts_for(B, S);
  Buffer sums(B * parts * size, 0.f);  // of a head: (D, E), then (D)
  over_parts(B, S, parts, [&](int64_t b, int64_t part, int64_t first, int64_t last) {
    Some some(D, E);
    std::vector<int64_t> tokens;
    while (first < last) {
      first = list(tokens, real_of(real, b), first, last);
      float* of_head = sums.data() + (b * parts + part) * size;
      for (int64_t h = 0; h < H; h++, of_head += D * (E + 1))
        remember(some, tokens, rows_of(k, b, h), rows_of(v, b, h), D, E, of_head, of_head + D * E);
    }
  });
  add_up(sums, B, parts, size);
  pack(sums, parts, memory);

  const int64_t of_sample = parts * size;
  parts = (L + SOME - 1) / SOME;
  over_parts(B, L, parts, [&](int64_t b, int64_t, int64_t first, int64_t last) {
    Some some(D, E);
    const int64_t n = last - first;
    some.from.resize(n), some.to.resize(n);
    const float* of_head = sums.data() + b * of_sample;
    for (int64_t h = 0; h < H; h++, of_head += D * (E + 1)) {
      const Rows queries = rows_of(q, b, h), results = rows_of(out, b, h);
      float* weight = total.data_ptr<float>() + (b * H + h) * L + first;
      for (int64_t i = 0; i < n; i++) {
        const float* query = queries[first + i];
        float* to = some.features.data() + i * D;
        vec dot{};
        for (int64_t d = 0; d < D; d += W) {
          const vec x = features(load(query + d));
          store(to + d, x), dot += x * load(of_head + D * E + d);
        }
        weight[i] = sum(dot);
        const float factor = weight[i] > NEGLIGIBLE ? 1 / weight[i] : 1;
        for (int64_t d = 0; d < D; d += W) store(to + d, load(to + d) * factor);
        some.from[i] = to, some.to[i] = results[first + i];
      }
      rows_product(n, E, D, some.from.data(), of_head, E, some.to.data(), false);
    }
  });
  return {out, total, memory};
}

// to (columns, rows) = from^T, whose rows are `apart` numbers apart.
void turn(float* to, const float* from, int64_t apart, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) to[j * rows + i] = from[i * apart + j];
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& real, const at::Tensor& out, const at::Tensor& total,
    const at::Tensor& memory) {
  const int64_t B = q.size(0), H = q.size(1), L = q.size(2), D = q.size(3);
  const int64_t S = k.size(2), E = v.size(3), size = H * D * (E + 1);
  at::Tensor grad_q = host_layout(q, D), grad_k = host_layout(k, D), grad_v = host_layout(v, E);

  // Of the memory; and of the queries, on the way.
  const int64_t parts = parts_for(B, L);
  Buffer sums(B * parts * size, 0.f);
  over_parts(B, L, parts, [&](int64_t b, int64_t part, int64_t start, int64_t stop) {
    Some some(D, E);
    Buffer turned(H * E * D), ends(SOME), totals(D);
    for (int64_t h = 0; h < H; h++)
      turn(turned.data() + h * E * D, memory.data_ptr<float>() + (b * H + h) * D * (E + 1), E + 1, D, E);
    some.from.resize(SOME), some.to.resize(SOME), some.values.resize(SOME);
    for (int64_t first = start; first < stop; first += SOME) {
      const int64_t n = std::min(SOME, stop - first);
      float* of_head = sums.data() + (b * parts + part) * size;
      for (int64_t h = 0; h < H; h++, of_head += D * (E + 1)) {
        const Rows queries = rows_of(q, b, h), results = rows_of(out, b, h);
        const Rows grads = rows_of(grad, b, h), of_q = rows_of(grad_q, b, h);
        const float* weight = total.data_ptr<float>() + (b * H + h) * L + first;
        const float* last = memory.data_ptr<float>() + (b * H + h) * D * (E + 1) + E;
        for (int64_t d = 0; d < D; d++) totals[d] = last[d * (E + 1)];
        for (int64_t i = 0; i < n; i++) {
          const float factor = weight[i] > NEGLIGIBLE ? 1 / weight[i] : 1;
          const float *of_row = grads[first + i], *row = results[first + i];
          float* to = some.grads.data() + i * E;
          vec dot{};
          for (int64_t e = 0; e < E; e += W) {
            const vec x = load(of_row + e) * factor;
            store(to + e, x), dot += x * load(row + e);
          }
          // A negligible total was not divided by.
          ends[i] = weight[i] > NEGLIGIBLE ? -sum(dot) : 0;
          const vec end = splat(ends[i]);
          const float* query = queries[first + i];
          float *feature = some.features.data() + i * D, *of_feature = some.others.data() + i * D;
          for (int64_t d = 0; d < D; d += W) {
            const vec x = features(load(query + d));
            store(feature + d, x), store(of_feature + d, end * load(totals.data() + d));
            float* of_total = of_head + D * E + d;
            store(of_total, load(of_total) + x * end);
          }
          some.from[i] = some.values[i] = to, some.to[i] = of_feature;
        }
        columns_product(D, E, n, some.features.data(), D, some.values.data(), of_head, E, true);
        rows_product(n, D, E, some.from.data(), turned.data() + h * E * D, D, some.to.data(), true);
        for (int64_t i = 0; i < n; i++) {
          const float *feature = some.features.data() + i * D, *of_feature = some.to[i];
          float* to = of_q[first + i];
          for (int64_t d = 0; d < D; d += W)
            store(to + d, smaller(load(feature + d), splat(1)) * load(of_feature + d));
        }
      }
    }
  });
  add_up(sums, B, parts, size);

  const int64_t of_sample = parts * size;
  over_parts(B, S, parts_for(B, S), [&](int64_t b, int64_t, int64_t first, int64_t last) {
    Some some(D, E);
    std::vector<int64_t> tokens;
    Buffer turned(H * E * D);
    const float* of_sums = sums.data() + b * of_sample;
    for (int64_t h = 0; h < H; h++)
      turn(turned.data() + h * E * D, of_sums + h * D * (E + 1), E, D, E);
    const bool* there = real_of(real, b);
    for (int64_t i = first; there && i < last; i++)
      for (int64_t h = 0; !there[i] && h < H; h++) {
        std::fill_n(rows_of(grad_k, b, h)[i], D, 0.f);
        std::fill_n(rows_of(grad_v, b, h)[i], E, 0.f);
      }
    while (first < last) {
      first = list(tokens, there, first, last);
      const int64_t n = static_cast<int64_t>(tokens.size());
      some.from.resize(n), some.to.resize(n), some.values.resize(n);
      for (int64_t h = 0; h < H; h++) {
        const Rows keys = rows_of(k, b, h), values = rows_of(v, b, h);
        const Rows of_k = rows_of(grad_k, b, h), of_v = rows_of(grad_v, b, h);
        const float *of_memory = of_sums + h * D * (E + 1), *of_total = of_memory + D * E;
        for (int64_t i = 0; i < n; i++) {
          const float* key = keys[tokens[i]];
          float *feature = some.features.data() + i * D, *of_feature = some.others.data() + i * D;
          for (int64_t d = 0; d < D; d += W) {
            store(feature + d, features(load(key + d)));
            store(of_feature + d, load(of_total + d));
          }
          some.values[i] = values[tokens[i]], some.from[i] = feature, some.to[i] = of_v[tokens[i]];
        }
        rows_product(n, E, D, some.from.data(), of_memory, E, some.to.data(), false);
        for (int64_t i = 0; i < n; i++) some.to[i] = some.others.data() + i * D;
        rows_product(n, D, E, some.values.data(), turned.data() + h * E * D, D, some.to.data(), true);
        for (int64_t i = 0; i < n; i++) {
          float* to = of_k[tokens[i]];
          for (int64_t d = 0; d < D; d += W)
            store(to + d, smaller(load(some.from[i] + d), splat(1)) * load(some.to[i] + d));
        }
      }
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
