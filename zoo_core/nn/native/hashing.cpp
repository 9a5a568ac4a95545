// Sorting tokens by bucket, and laying out who sees whom; see zoo_core/nn/hashing.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace zoo {
namespace {

// The nearest of `number` directions, from turned (B, H, N, R, K) to (B, H, R, N).
at::Tensor buckets(const at::Tensor& turned_of, int64_t number) {
  const at::Tensor turned = turned_of.contiguous();
  const int64_t B = turned.size(0), H = turned.size(1), N = turned.size(2), R = turned.size(3);
  const int64_t K = turned.size(4), last = number % 2 ? K - 1 : K;  // the last one has no opposite
  at::Tensor found = at::empty({B, H, R, N}, turned.options().dtype(at::kLong));
  const float* from = turned.data_ptr<float>();
  int64_t* to = found.data_ptr<int64_t>();
  at::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; u++)
      for (int64_t i = 0; i < N; i++)
        for (int64_t r = 0; r < R; r++) {
          const float* row = from + ((u * N + i) * R + r) * K;
          int64_t nearest = 0;
          float far = last > 0 ? std::abs(row[0]) : row[0];
          for (int64_t c = 1; c < K; c++) {
            const float x = c < last ? std::abs(row[c]) : row[c];
            nearest = x > far ? c : nearest;
            far = x > far ? x : far;
          }
          const int64_t opposite = row[nearest] < 0 ? K : 0;
          to[(u * R + r) * N + i] = std::min(nearest + opposite, number - 1);
        }
  });
  return found;
}

// Tokens sorted by bucket, those of one bucket as they came: the fields of `_Sorted`, of one round
// of one head.
struct Sorted {
  const int64_t* of;  // the bucket of each token
  const bool* real;   // or nothing
  int64_t *order, *place;
  std::vector<int64_t> start, count;

  // Padding has a bucket of its own, behind all others.
  int64_t bucket(int64_t i, int64_t number) const { return real && !real[i] ? number : of[i]; }

  void sort(int64_t N, int64_t number) {
    count.assign(number + 1, 0), start.assign(number + 1, 0);
    for (int64_t i = 0; i < N; i++) {
      TORCH_CHECK(of[i] >= 0 && of[i] < number, "bucket ", of[i], " of ", number);
      count[bucket(i, number)]++;
    }
    for (int64_t b = 0; b < number; b++) start[b + 1] = start[b] + count[b];
    std::vector<int64_t> next = start;
    for (int64_t i = 0; i < N; i++) order[place[i] = next[bucket(i, number)]++] = i;
  }
};

using Tensors = std::tuple<at::Tensor, at::Tensor, std::optional<at::Tensor>, at::Tensor, at::Tensor,
                           at::Tensor>;

// The fields of `Windows`, for buckets (B, H, R, N); without `keys`, they are those of the queries.
Tensors windows(
    const at::Tensor& queries_of, const std::optional<at::Tensor>& keys_of,
    const std::optional<at::Tensor>& key_padding, int64_t number, int64_t size, int64_t width,
    int64_t before) {
  const at::Tensor queries = queries_of.contiguous();
  const at::Tensor keys = keys_of ? keys_of->contiguous() : queries;
  const int64_t B = queries.size(0), H = queries.size(1), R = queries.size(2), N = queries.size(3);
  const int64_t C = (N + size - 1) / size;
  TORCH_CHECK(keys.sizes() == queries.sizes() && width <= N, "queries and keys differ in number");
  std::optional<at::Tensor> padding, real;
  if (key_padding) {
    padding = key_padding->contiguous();
    real = at::empty({B, H, R, C, width}, queries.options().dtype(at::kBool));
  }
  at::Tensor query = at::empty({B, H, R, C, size}, queries.options());
  at::Tensor key = at::empty({B, H, R, C, width}, queries.options());
  at::Tensor row = at::empty({B, H, R, N}, queries.options()), first = at::empty_like(row);
  at::Tensor place = at::empty_like(row);
  at::parallel_for(0, B * H * R, 1, [&](int64_t begin, int64_t end) {
    Sorted ours, theirs;
    std::vector<int64_t> order(N), starts(C);
    for (int64_t u = begin; u < end; u++) {
      const bool* shown = padding ? padding->data_ptr<bool>() + u / (H * R) * N : nullptr;
      const int64_t tokens = shown ? std::count(shown, shown + N, true) : N;
      int64_t* chunks = query.data_ptr<int64_t>() + u * C * size;
      ours.of = queries.data_ptr<int64_t>() + u * N, ours.real = shown;
      ours.order = chunks, ours.place = row.data_ptr<int64_t>() + u * N;
      ours.sort(N, number);
      std::fill(chunks + N, chunks + C * size, 0);
      int64_t* places = place.data_ptr<int64_t>() + u * N;
      if (keys_of) {
        theirs.of = keys.data_ptr<int64_t>() + u * N, theirs.real = shown;
        theirs.order = order.data(), theirs.place = places;
        theirs.sort(N, number);
      } else {
        std::copy_n(ours.place, N, places);
      }
      const Sorted& other = keys_of ? theirs : ours;
      for (int64_t c = 0; c < C; c++) {
        const int64_t middle = std::max<int64_t>(std::min(c * size + size / 2, tokens - 1), 0);
        const int64_t b = ours.bucket(ours.order[middle], number);
        const int64_t within = 2 * (middle - ours.start[b]) + 1;
        const int64_t matching = other.start[b] + within * other.count[b] / (2 * ours.count[b]);
        starts[c] = std::min(matching - size / 2 - before * size, tokens - width);
        starts[c] = std::max<int64_t>(starts[c], 0);
        std::copy_n(other.order + starts[c], width,
                    key.data_ptr<int64_t>() + (u * C + c) * width);
        for (int64_t w = 0; real && w < width; w++)
          real->data_ptr<bool>()[(u * C + c) * width + w] = starts[c] + w < tokens;
      }
      for (int64_t p = 0; p < N; p++)
        first.data_ptr<int64_t>()[u * N + ours.order[p]] = starts[p / size];
    }
  });
  return {query, key, real, row, place, first};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def("buckets(Tensor turned, int number) -> Tensor");
  library.def(
      "windows(Tensor queries, Tensor? keys, Tensor? key_padding, int number, SymInt size, "
      "SymInt width, int before) -> (Tensor, Tensor, Tensor?, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("buckets", &buckets);
  library.impl("windows", &windows);
}

}  // namespace zoo
