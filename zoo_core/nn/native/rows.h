// Tensors (B, H, N, width) of floats as rows, which are contiguous.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

namespace zoo {

// The total weight that counts as zero, as in zoo_core/nn/precision.py.
constexpr float NEGLIGIBLE =
    std::numeric_limits<float>::min() / std::numeric_limits<float>::epsilon();

// One head of one sample.
struct Rows {
  float* base;
  int64_t stride;
  float* operator[](int64_t i) const { return base + i * stride; }
  Rows from(int64_t i) const { return {base + i * stride, stride}; }
  Rows right(int64_t column) const { return {base + column, stride}; }
};

inline Rows rows_of(const at::Tensor& x, int64_t b, int64_t h) {
  TORCH_CHECK(x.stride(3) == 1, "the numbers of a row must lie side by side");
  return {x.data_ptr<float>() + b * x.stride(0) + h * x.stride(1), x.stride(2)};
}

// Has a row brought near, for later: rows lie too far apart for the processor to foresee the next.
inline void fetch(const float* row, int64_t width) {
  constexpr int64_t line = 64 / sizeof(float);
  for (int64_t d = 0; d < width; d += line) __builtin_prefetch(row + d);
}

// As many tokens as `like`, in the layout of hosts, tokens before heads.
inline at::Tensor host_layout(const at::Tensor& like, int64_t width) {
  return at::empty({like.size(0), like.size(2), like.size(1), width}, like.options()).transpose(1, 2);
}

// Which of a sample's tokens are real, side by side; null: all.
inline const bool* real_of(const std::optional<at::Tensor>& real, int64_t b) {
  return real ? real->data_ptr<bool>() + b * real->stride(0) : nullptr;
}

// The real ones of a sample's tokens, by real (B, N); without it, all.
inline std::vector<int64_t> real_tokens(
    const std::optional<at::Tensor>& real, int64_t b, int64_t length) {
  TORCH_CHECK(!real || (b < real->size(0) && real->size(1) == length), "padding of other tokens");
  std::vector<int64_t> tokens;
  tokens.reserve(length);
  const bool* shown = real_of(real, b);
  for (int64_t i = 0, step = real ? real->stride(1) : 0; i < length; i++)
    if (!shown || shown[i * step]) tokens.push_back(i);
  return tokens;
}

// Runs f(sample, head, heads) for some heads of a sample from one on, in threads.
template <class F>
void over_heads(int64_t B, int64_t H, F f) {
  at::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    for (int64_t some; begin < end; begin += some) {
      some = std::min(end - begin, H - begin % H);
      f(begin / H, begin % H, some);
    }
  });
}

}  // namespace zoo
