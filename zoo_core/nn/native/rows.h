// Tensors (B, H, N, width) of floats as rows, which are contiguous.
#pragma once

#include <ATen/ATen.h>

namespace zoo {

// One head of one sample.
struct Rows {
  float* base;
  int64_t stride;
  float* operator[](int64_t i) const { return base + i * stride; }
  Rows from(int64_t i) const { return {base + i * stride, stride}; }
};

inline Rows rows_of(const at::Tensor& x, int64_t b, int64_t h) {
  TORCH_CHECK(x.stride(3) == 1, "the numbers of a row must lie side by side");
  return {x.data_ptr<float>() + b * x.stride(0) + h * x.stride(1), x.stride(2)};
}

// As many tokens as `like`, in the layout of hosts, tokens before heads.
inline at::Tensor host_layout(const at::Tensor& like, int64_t width) {
  return at::empty({like.size(0), like.size(2), like.size(1), width}, like.options()).transpose(1, 2);
}

}  // namespace zoo
