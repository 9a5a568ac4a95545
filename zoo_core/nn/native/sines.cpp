// Queries or keys times codes of positions that are sums of sinusoids, with noise F, C and S:
//
//     out_nr = sum_d x_nd code_ndr
//     code_ndr = f_d F_dr + sum_k a_dk (cos(w_dk n + o_dk) C_dkr + sin(w_dk n + o_dk) S_dkr)
//
// Around the middle of a run of tokens cosines are even and sines are odd: with the noise turned to
// that middle, two tokens at the same distance from it share all products but the last,
//
//     code(+t) = E + O,   code(-t) = E - O,   E = F + sum_k cos(w t) C',   O = sum_k sin(w t) S'.

#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "rows.h"
#include "sinusoids.h"
#include "vectors.h"

namespace zoo {
namespace {

constexpr int64_t PAIRS = 48;   // of tokens in a run: a sample's results fit L1
constexpr int64_t SAMPLES = 2;  // that share the codes of a run

// cosines and sines of all distances 1/2, 3/2, ... from a middle, (n, PAIRS places).
struct Distances {
  static constexpr int64_t PLACES = (PAIRS + W - 1) / W * W;
  Buffer cosines, sines;

  explicit Distances(const Turns& half) {
    const int64_t n = static_cast<int64_t>(half.re.size());
    Buffer re(PAIRS * n), im(PAIRS * n);
    std::vector<const float*> re_rows(PAIRS), im_rows(PAIRS);
    Turns now = half, step = half;
    step.by(half);
    for (int64_t j = 0; j < PAIRS; j++, now.by(step)) {
      std::copy(now.re.begin(), now.re.end(), re.begin() + j * n);
      std::copy(now.im.begin(), now.im.end(), im.begin() + j * n);
      re_rows[j] = re.data() + j * n, im_rows[j] = im.data() + j * n;
    }
    cosines.resize(n * PLACES), sines.resize(n * PLACES);
    turn_rows(cosines.data(), PLACES, re_rows.data(), PAIRS, n, 1.f);
    turn_rows(sines.data(), PLACES, im_rows.data(), PAIRS, n, 1.f);
  }
};

// What a thread works in. Of a run, the tokens before its middle come first, the nearest first.
struct Work {
  Buffer noise, x, out;  // turned (2 K + 1, R); (samples, D, 2 PAIRS places); (samples, 2 PAIRS, R)
  Buffer nothing;        // (D)

  Work(int64_t D, int64_t K, int64_t R)
      : noise((2 * K + 1) * R), x(SAMPLES * D * 2 * Distances::PLACES),
        out(SAMPLES * 2 * PAIRS * R), nothing(D, 0.f) {}
};

// The token of a run at place j before its middle, or behind it.
inline int64_t before(int64_t j, int64_t pairs) { return pairs - 1 - j; }
inline int64_t behind(int64_t j, int64_t pairs) { return pairs + j; }

// Adds to the results of M pairs of tokens, from pair j on, what one feature gives: V vectors.
// noise: rows F, K of C', K of S', R apart. x, out: of the first sample.
template <int M, int V, int S>
__attribute__((noinline)) void pairs_block(
    int64_t K, int64_t R, const float* cosines, const float* sines, const float* noise, int64_t j,
    int64_t at, const float* x, int64_t x_apart, float* out) {
  constexpr int64_t P = Distances::PLACES;
  vec even[M][V], odd[M][V];
  ZOO_UNROLL for (int v = 0; v < V; v++) {
    const vec still = load(noise + at + W * v);
    ZOO_UNROLL for (int i = 0; i < M; i++) even[i][v] = still, odd[i][v] = vec{};
  }
  const float *one = noise + R + at, *two = one + K * R;
  for (int64_t k = 0; k < K; k++, one += R, two += R) {
    vec z[V];
    ZOO_UNROLL for (int v = 0; v < V; v++) z[v] = load(one + W * v);
    ZOO_UNROLL for (int i = 0; i < M; i++) {
      const float y = cosines[k * P + j + i];
      ZOO_UNROLL for (int v = 0; v < V; v++) even[i][v] += y * z[v];
    }
    ZOO_UNROLL for (int v = 0; v < V; v++) z[v] = load(two + W * v);
    ZOO_UNROLL for (int i = 0; i < M; i++) {
      const float y = sines[k * P + j + i];
      ZOO_UNROLL for (int v = 0; v < V; v++) odd[i][v] += y * z[v];
    }
  }
  ZOO_UNROLL for (int i = 0; i < M; i++) {
    float left[S], right[S], *to = out + (j + i) * R + at;
    ZOO_UNROLL for (int b = 0; b < S; b++)
      left[b] = x[b * x_apart + j + i], right[b] = x[b * x_apart + P + j + i];
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      const vec minus = even[i][v] - odd[i][v], plus = even[i][v] + odd[i][v];
      ZOO_UNROLL for (int b = 0; b < S; b++) {
        float *one = to + b * 2 * PAIRS * R + W * v, *two = one + PAIRS * R;
        store(one, load(one) + left[b] * minus), store(two, load(two) + right[b] * plus);
      }
    }
  }
}

// The noise of one feature turned to the middle of a run, by re and im of K sinusoids.
void turn_noise(float* to, const float* noise, const float* re, const float* im, int64_t K,
                int64_t R) {
  for (int64_t k = 0; k < K; k++)
    for (int64_t r = 0; r < R; r += W) {
      const vec c = load(noise + k * R + r), s = load(noise + (K + k) * R + r);
      store(to + k * R + r, re[k] * c + im[k] * s);
      store(to + (K + k) * R + r, re[k] * s - im[k] * c);
    }
}

// Encodes the tokens of a run of S samples, whose x and out are in work.
template <int S>
void encode_run(Work& work, const Distances& distances, const float* re, const float* im,
                const float* noise, const float* still, const float* free, int64_t pairs,
                int64_t D, int64_t K, int64_t R) {
  constexpr int64_t P = Distances::PLACES;
  std::fill_n(work.out.begin(), S * 2 * PAIRS * R, 0.f);
  for (int64_t d = 0; d < D; d++) {
    float* turned = work.noise.data();
    for (int64_t r = 0; r < R; r += W)
      store(turned + r, free ? still[d] * load(free + d * R + r) : vec{});
    turn_noise(turned + R, noise + d * 2 * K * R, re + d * K, im + d * K, K, R);
    const float *cosines = distances.cosines.data() + d * K * P;
    const float *sines = distances.sines.data() + d * K * P, *x = work.x.data() + d * 2 * P;
    over_columns(R, [&]<int V>(int64_t at) {
      int64_t j = 0;
      auto block = [&]<int M>() {
        for (; j + M <= pairs; j += M)
          pairs_block<M, V, S>(K, R, cosines, sines, turned, j, at, x, D * 2 * P, work.out.data());
      };
      block.template operator()<3>(), block.template operator()<2>();
      block.template operator()<1>();
    });
  }
}

// Takes the tokens of a run, (D, 2 PLACES): those before its middle, then those behind it.
void take(float* to, const float* nothing, Rows x, const Run& run, int64_t pairs, int64_t D) {
  constexpr int64_t P = Distances::PLACES;
  const float* rows[2 * P];
  std::fill_n(rows, 2 * P, nothing);
  for (int64_t j = 0; j < pairs; j++) {
    rows[j] = x[run.first + before(j, pairs)];
    if (behind(j, pairs) < run.size) rows[P + j] = x[run.first + behind(j, pairs)];
  }
  turn_rows(to, 2 * P, rows, 2 * P, D, 1.f);
}

void give(const float* from, Rows out, const Run& run, int64_t pairs, int64_t R) {
  for (int64_t j = 0; j < pairs; j++) {
    std::copy_n(from + j * R, R, out[run.first + before(j, pairs)]);
    if (behind(j, pairs) < run.size)
      std::copy_n(from + (PAIRS + j) * R, R, out[run.first + behind(j, pairs)]);
  }
}

at::Tensor encode(
    const at::Tensor& x, at::IntArrayRef shape, const at::Tensor& halves, const at::Tensor& phases,
    const at::Tensor& amplitudes, const at::Tensor& noise, const std::optional<at::Tensor>& still,
    const std::optional<at::Tensor>& free) {
  const int64_t B = x.size(0), H = x.size(1), D = x.size(3);
  const int64_t K = noise.size(1) / 2, R = noise.size(2), n = D * K;
  at::Tensor out = host_layout(x, R);
  const std::vector<Run> runs = runs_of(shape, 2 * PAIRS);
  const int64_t count = static_cast<int64_t>(runs.size());
  over_parts(H, parts_for(H, count), count, [&](int64_t h, int64_t, int64_t first, int64_t last) {
    Sinusoids sinusoids(halves, phases, h, 2 * PAIRS);
    const Distances distances(sinusoids.half_step());
    const float* amplitude = amplitudes.data_ptr<float>() + h * n;
    Work work(D, K, R);
    Buffer re(n), im(n);
    for (int64_t u = first; u < last; u++) {
      const int64_t pairs = (runs[u].size + 1) / 2;
      u == first ? sinusoids.start(runs[u]) : sinusoids.next(runs[u]);
      const Turns middle = sinusoids.middle(pairs);
      for (int64_t i = 0; i < n; i++)
        re[i] = amplitude[i] * middle.re[i], im[i] = amplitude[i] * middle.im[i];
      for (int64_t b = 0; b < B; b += SAMPLES) {
        const int64_t samples = std::min(SAMPLES, B - b);
        for (int64_t i = 0; i < samples; i++)
          take(work.x.data() + i * D * 2 * Distances::PLACES, work.nothing.data(),
               rows_of(x, b + i, h), runs[u], pairs, D);
        const auto encode_all = samples == 2 ? encode_run<2> : encode_run<1>;
        encode_all(work, distances, re.data(), im.data(), noise.data_ptr<float>(),
                   still ? still->data_ptr<float>() + h * D : nullptr,
                   free ? free->data_ptr<float>() : nullptr, pairs, D, K, R);
        for (int64_t i = 0; i < samples; i++)
          give(work.out.data() + i * 2 * PAIRS * R, rows_of(out, b + i, h), runs[u], pairs, R);
      }
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def(
      "sines(Tensor x, SymInt[] shape, Tensor halves, Tensor phases, Tensor amplitudes, Tensor noise, "
      "Tensor? still, Tensor? free) -> Tensor");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("sines", &encode);
}

}  // namespace zoo
