// Vectors of floats, and products of small matrices whose results stay in registers.
//
// By the vector extensions of gcc and clang: one source for AVX-512, AVX2, NEON and what has none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace zoo {

// Numbers that begin at a cache line: a vector across two lines takes twice as long to load.
template <class T>
struct Aligned {
  using value_type = T;
  static constexpr std::align_val_t LINE{64};
  Aligned() = default;
  template <class U>
  Aligned(const Aligned<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), LINE)); }
  void deallocate(T* p, std::size_t) { ::operator delete(p, LINE); }
  bool operator==(const Aligned&) const { return true; }
};
using Buffer = std::vector<float, Aligned<float>>;

// W: floats in a vector. Of results, ROWS x VECTORS vectors are kept, as many as there are registers.
#if defined(__AVX512F__)
constexpr int W = 16, ROWS = 6, VECTORS = 4;
#elif defined(__AVX2__)
constexpr int W = 8, ROWS = 6, VECTORS = 2;
#else
constexpr int W = 4, ROWS = 6, VECTORS = 4;
#endif

typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));

// Loops over vectors in registers must be gone before the compiler decides what to keep there.
#define ZOO_UNROLL _Pragma("GCC unroll 16")

inline vec load(const float* from) { return *reinterpret_cast<const vec*>(from); }
inline void store(float* to, vec x) { *reinterpret_cast<vec*>(to) = x; }
inline vec splat(float x) { return vec{} + x; }
inline vec larger(vec x, vec y) { return x > y ? x : y; }
inline vec smaller(vec x, vec y) { return x < y ? x : y; }

inline float sum(vec x) {
  float halves[W];
  store(halves, x);
  ZOO_UNROLL for (int n = W / 2; n > 0; n /= 2)
    ZOO_UNROLL for (int i = 0; i < n; i++) halves[i] += halves[i + n];
  return halves[0];
}

// 2 ** x for x <= 127, to a few units in the last place; 0 below the smallest normal number, since
// products of denormal ones take a hundred times as long.
inline vec exp2(vec x) {
  const vec bounded = larger(x, splat(-126.f));
  const vec shifted = bounded + 12582912.f;  // 1.5 * 2 ** 23: its last bits are the nearest integer
  const vec r = bounded - (shifted - 12582912.f);
  vec p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.f;
  const vec power = (vec)((ivec)p + ((ivec)shifted << 23));
  return x >= -126.f ? power : x < -126.f ? vec{} : x;  // NaN stays NaN
}

inline float dot(const float* x, const float* y, int64_t width) {
  vec total{};
  for (int64_t i = 0; i < width; i += W) total += load(x + i) * load(y + i);
  return sum(total);
}

constexpr float LOG2_E = 1.442695040888963f;

// One vector of two, by the places of its numbers in a followed by b.
template <int... L>
inline vec pick(vec a, vec b, std::integer_sequence<int, L...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, L...);
#else
  return __builtin_shuffle(a, b, ivec{L...});
#endif
}

// Of a square of numbers, swaps those S apart across the diagonal, in each square of 2 S.
template <int S, int... L>
inline void swap_apart(vec* x, std::integer_sequence<int, L...>) {
  using Upper = std::integer_sequence<int, (L & S ? W + L - S : L)...>;
  using Lower = std::integer_sequence<int, (L & S ? W + L : L + S)...>;
  ZOO_UNROLL for (int i = 0; i < W; i++) {
    if (i & S) continue;
    const vec a = x[i], b = x[i + S];
    x[i] = pick(a, b, Upper{}), x[i + S] = pick(a, b, Lower{});
  }
}

// Turns a square of W x W numbers.
inline void turn_square(vec* x) {
  using Lanes = std::make_integer_sequence<int, W>;
  swap_apart<1>(x, Lanes{}), swap_apart<2>(x, Lanes{});
  if constexpr (W > 4) swap_apart<4>(x, Lanes{});
  if constexpr (W > 8) swap_apart<8>(x, Lanes{});
}

// Of pairs of vectors, the sums of numbers S apart, in the places of the one and of the other.
template <int S, int... L>
inline void add_apart(vec* x, std::integer_sequence<int, L...>) {
  using Upper = std::integer_sequence<int, (L & S ? W + L - S : L)...>;
  using Lower = std::integer_sequence<int, (L & S ? W + L : L + S)...>;
  ZOO_UNROLL for (int i = 0; i < W; i += 2 * S)
    x[i] = pick(x[i], x[i + S], Upper{}) + pick(x[i], x[i + S], Lower{});
}

// The sums of W vectors, side by side.
inline vec sums_of(vec* x) {
  using Lanes = std::make_integer_sequence<int, W>;
  add_apart<1>(x, Lanes{}), add_apart<2>(x, Lanes{});
  if constexpr (W > 4) add_apart<4>(x, Lanes{});
  if constexpr (W > 8) add_apart<8>(x, Lanes{});
  return x[0];
}

template <int... L>
inline ivec lanes(std::integer_sequence<int, L...>) {
  return ivec{L...};
}

// 0, 1, 2 ...
inline ivec lanes() { return lanes(std::make_integer_sequence<int, W>{}); }

// Writes the numbers of x that are not zero, and their y, side by side, and anything up to whole
// vectors of both; gives how many there are.
inline int64_t pack(vec x, ivec y, float* to, int32_t* to_y) {
#if defined(__AVX512F__)
  const __m512 numbers = (__m512)x;
  const __mmask16 some = _mm512_cmp_ps_mask(numbers, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  store(to, (vec)_mm512_maskz_compress_ps(some, numbers));
  *reinterpret_cast<ivec*>(to_y) = (ivec)_mm512_maskz_compress_epi32(some, (__m512i)y);
  return __builtin_popcount(some);
#else
  int64_t n = 0;
  for (int i = 0; i < W; i++) {  // which are zero cannot be foretold: no branch
    to[n] = x[i], to_y[n] = y[i];
    n += x[i] != 0;
  }
  return n;
#endif
}

// to (width, lanes) = factor * rows^T: n rows by pointers, zeros in the lanes from n on.
inline void turn_rows(
    float* to, int64_t lanes, const float* const* rows, int64_t n, int64_t width, float factor) {
  for (int64_t i = 0; i < lanes; i += W)
    for (int64_t d = 0; d < width; d += W) {
      vec x[W];
      ZOO_UNROLL for (int j = 0; j < W; j++)
        x[j] = i + j < n ? load(rows[i + j] + d) * factor : vec{};
      turn_square(x);
      ZOO_UNROLL for (int j = 0; j < W; j++) store(to + (d + j) * lanes + i, x[j]);
    }
}

// to (columns, rows) = from^T, whose rows are `apart` numbers apart.
inline void turn(float* to, const float* from, int64_t apart, int64_t rows, int64_t columns) {
  std::vector<const float*> some(rows);
  for (int64_t i = 0; i < rows; i++) some[i] = from + i * apart;
  turn_rows(to, rows, some.data(), rows, columns, 1.f);
}

// to = factor * to + from.
inline void add(float* to, float factor, const float* from, int64_t width) {
  for (int64_t e = 0; e < width; e += W) store(to + e, load(to + e) * factor + load(from + e));
}

// c_i = sum_p a_i[p] b_p, added to what c_i holds if `add`: M rows, V vectors of columns.
// a, c: pointers to the M rows. b: row p begins at b + p * ldb.
template <int M, int V>
__attribute__((noinline)) void rows_block(
    int64_t K, const float* const* a, const float* b, int64_t ldb, float* const* c, int64_t at,
    bool add) {
  const float* row[M];
  vec held[M][V];
  ZOO_UNROLL for (int i = 0; i < M; i++) {
    row[i] = a[i];
    ZOO_UNROLL for (int j = 0; j < V; j++) held[i][j] = add ? load(c[i] + at + W * j) : vec{};
  }
  for (int64_t p = 0; p < K; p++) {
    vec x[V];
    ZOO_UNROLL for (int j = 0; j < V; j++) x[j] = load(b + p * ldb + at + W * j);
    ZOO_UNROLL for (int i = 0; i < M; i++) {
      const float y = row[i][p];
      ZOO_UNROLL for (int j = 0; j < V; j++) held[i][j] += y * x[j];
    }
  }
  ZOO_UNROLL for (int i = 0; i < M; i++)
    ZOO_UNROLL for (int j = 0; j < V; j++) store(c[i] + at + W * j, held[i][j]);
}

// c_i = sum_p a[p][i] b_p, added to what c_i holds if `add`: M rows, V vectors of columns.
// a: row p, M of its numbers, begins at a + p * lda. b: pointers to the K rows. c: row i begins at
// c + i * ldc.
template <int M, int V>
__attribute__((noinline)) void columns_block(
    int64_t K, const float* a, int64_t lda, const float* const* b, float* c, int64_t ldc, int64_t at,
    bool add) {
  vec held[M][V];
  ZOO_UNROLL for (int i = 0; i < M; i++)
    ZOO_UNROLL for (int j = 0; j < V; j++)
      held[i][j] = add ? load(c + i * ldc + at + W * j) : vec{};
  for (int64_t p = 0; p < K; p++) {
    const float* row = b[p] + at;
    vec x[V];
    ZOO_UNROLL for (int j = 0; j < V; j++) x[j] = load(row + W * j);
    ZOO_UNROLL for (int i = 0; i < M; i++) {
      const float y = a[p * lda + i];
      ZOO_UNROLL for (int j = 0; j < V; j++) held[i][j] += y * x[j];
    }
  }
  ZOO_UNROLL for (int i = 0; i < M; i++)
    ZOO_UNROLL for (int j = 0; j < V; j++) store(c + i * ldc + at + W * j, held[i][j]);
}

// With fewer vectors of a row more rows are kept: sums that wait for each other take longer.
template <int V>
constexpr int ROWS_OF = V == VECTORS ? ROWS : 8;

// Runs f<V>(column) over `width` columns, a multiple of W, by as many vectors as are kept at once.
template <class F>
inline void over_columns(int64_t width, F f) {
  int64_t at = 0;
  for (; at + VECTORS * W <= width; at += VECTORS * W) f.template operator()<VECTORS>(at);
  if constexpr (VECTORS > 2)
    for (; at + 2 * W <= width; at += 2 * W) f.template operator()<2>(at);
  for (; at < width; at += W) f.template operator()<1>(at);
}

// c = a b for M rows given by pointers: a (M, K), b (K, width) with rows ldb apart, c (M, width).
inline void rows_product(
    int64_t M, int64_t width, int64_t K, const float* const* a, const float* b, int64_t ldb,
    float* const* c, bool add) {
  over_columns(width, [&]<int V>(int64_t at) {
    int64_t i = 0;
    constexpr int R = ROWS_OF<V>;
    for (; i + R <= M; i += R) rows_block<R, V>(K, a + i, b, ldb, c + i, at, add);
    for (; i + 2 <= M; i += 2) rows_block<2, V>(K, a + i, b, ldb, c + i, at, add);
    for (; i < M; i++) rows_block<1, V>(K, a + i, b, ldb, c + i, at, add);
  });
}

// c = a^T b: a (K, M) with rows lda apart, b (K, width) by pointers to its rows, c (M, width).
inline void columns_product(
    int64_t M, int64_t width, int64_t K, const float* a, int64_t lda, const float* const* b,
    float* c, int64_t ldc, bool add) {
  over_columns(width, [&]<int V>(int64_t at) {
    int64_t i = 0;
    constexpr int R = ROWS_OF<V>;
    for (; i + R <= M; i += R)
      columns_block<R, V>(K, a + i, lda, b, c + i * ldc, ldc, at, add);
    for (; i + 2 <= M; i += 2)
      columns_block<2, V>(K, a + i, lda, b, c + i * ldc, ldc, at, add);
    for (; i < M; i++) columns_block<1, V>(K, a + i, lda, b, c + i * ldc, ldc, at, add);
  });
}

}  // namespace zoo
