// The gradients of sums of sinusoids; see sines.cpp.
//
// First the products of tokens' gradients with the noise, g_n . C_dk and g_n . S_dk: what x and all
// parameters get are sums over these, each times a few numbers.

#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "rows.h"
#include "sinusoids.h"
#include "vectors.h"

namespace zoo {
namespace {

constexpr int64_t SOME = 32;  // tokens in a run: they, and their products with the noise, fit L1

// What the backward needs of one head's sinusoids, (K, D) each, beside where they are in a run.
struct Waves {
  Buffer re, im, step_re, step_im;
  const float* amplitude;

  Waves(const Turns& half, const float* amplitude)
      : re(half.re.size()), im(re.size()), amplitude(amplitude) {
    Turns step = half;
    step.by(half);
    step_re.assign(step.re.begin(), step.re.end()), step_im.assign(step.im.begin(), step.im.end());
  }
  void at(const Turns& first) {
    std::copy(first.re.begin(), first.re.end(), re.begin());
    std::copy(first.im.begin(), first.im.end(), im.begin());
  }
};

// Tokens of a run: gradients of results (SOME, R), their products with the noise for cosines and
// for sines, x, and its gradient, (SOME, D) each.
struct Pull {
  Buffer grads, cosines, sines, x, of_x;
  Buffer of_amplitude, of_phase, of_place;  // (K, D)
  std::vector<const float*> from;
  std::vector<float*> to_cosines, to_sines;

  Pull(int64_t D, int64_t K, int64_t R)
      : grads(SOME * R), cosines(SOME * D), sines(SOME * D), x(SOME * D), of_x(SOME * D),
        of_amplitude(K * D), of_phase(K * D), of_place(K * D) {
    for (int64_t i = 0; i < SOME; i++) {
      from.push_back(grads.data() + i * R);
      to_cosines.push_back(cosines.data() + i * D), to_sines.push_back(sines.data() + i * D);
    }
  }
};

// Adds what one sinusoid of V vectors of features gives to the gradients of n tokens, and what they
// give to its own. i: its place among all, at: the first feature.
template <int V>
void pull_block(Pull& pull, const Waves& waves, int64_t n, int64_t D, int64_t i, int64_t at) {
  vec c[V], s[V], step_c[V], step_s[V], a[V], amplitude[V] = {}, phase[V] = {}, place[V] = {};
  ZOO_UNROLL for (int v = 0; v < V; v++) {
    const int64_t j = i + W * v;
    c[v] = load(waves.re.data() + j), s[v] = load(waves.im.data() + j);
    step_c[v] = load(waves.step_re.data() + j), step_s[v] = load(waves.step_im.data() + j);
    a[v] = load(waves.amplitude + j);
  }
  for (int64_t t = 0; t < n; t++)
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      const int64_t j = t * D + at + W * v;
      const vec x = load(pull.x.data() + j);
      const vec one = load(pull.cosines.data() + j), two = load(pull.sines.data() + j);
      const vec along = c[v] * one + s[v] * two, across = x * (c[v] * two - s[v] * one);
      store(pull.of_x.data() + j, load(pull.of_x.data() + j) + a[v] * along);
      amplitude[v] += x * along, phase[v] += across, place[v] += across * static_cast<float>(t);
      const vec next = c[v] * step_c[v] - s[v] * step_s[v];
      s[v] = c[v] * step_s[v] + s[v] * step_c[v], c[v] = next;
    }
  ZOO_UNROLL for (int v = 0; v < V; v++) {
    const int64_t j = i + W * v;
    store(pull.of_amplitude.data() + j, amplitude[v]);
    store(pull.of_phase.data() + j, a[v] * phase[v]);
    store(pull.of_place.data() + j, a[v] * place[v]);
  }
}

// The same for all sinusoids. noise: 2 K times (R, D).
void pull_waves(Pull& pull, const Waves& waves, const float* noise, int64_t n, int64_t D, int64_t K,
                int64_t R) {
  for (int64_t k = 0; k < K; k++, noise += 2 * R * D) {
    rows_product(n, D, R, pull.from.data(), noise, D, pull.to_cosines.data(), false);
    rows_product(n, D, R, pull.from.data(), noise + R * D, D, pull.to_sines.data(), false);
    int64_t d = 0;
    for (; d + 2 * W <= D; d += 2 * W) pull_block<2>(pull, waves, n, D, k * D + d, d);
    for (; d < D; d += W) pull_block<1>(pull, waves, n, D, k * D + d, d);
  }
}

// Sets the gradients of n tokens to what comes from the code without a position, (R, D).
void pull_still(Pull& pull, const float* still, const float* free, double* of_still, int64_t n,
                int64_t D, int64_t R) {
  rows_product(n, D, R, pull.from.data(), free, D, pull.to_cosines.data(), false);
  for (int64_t t = 0; t < n; t++)
    for (int64_t d = 0; d < D; d++) {
      const int64_t j = t * D + d;
      of_still[d] += pull.x[j] * pull.cosines[j];
      pull.of_x[j] = still[d] * pull.cosines[j];
    }
}

// to (rows, R, D): the noise of so many of each feature's rows, each turned.
Buffer turn_all(const at::Tensor& noise) {
  const int64_t D = noise.size(0), rows = noise.size(1), R = noise.size(2);
  Buffer out(rows * R * D);
  for (int64_t k = 0; k < rows / 2; k++)
    for (int64_t half = 0; half < 2; half++)
      turn(out.data() + (2 * k + half) * R * D,
           noise.data_ptr<float>() + (half * (rows / 2) + k) * R, rows * R, D, R);
  return out;
}

// Sums over tokens of what sinusoids get, in each part of each head: of amplitudes, of phases, and
// on each axis of phases times places, (2 + axes, n); then (D), what has no position gets.
void add_run(double* sums, const Pull& pull, const Run& run, int64_t n) {
  const int64_t axes = static_cast<int64_t>(run.place.size());
  for (int64_t i = 0; i < n; i++) {
    const double phase = pull.of_phase[i];
    sums[i] += pull.of_amplitude[i], sums[n + i] += phase;
    for (int64_t a = 0; a + 1 < axes; a++)
      sums[(2 + a) * n + i] += static_cast<double>(run.place[a]) * phase;
    sums[(1 + axes) * n + i] += pull.of_place[i] + static_cast<double>(run.begin) * phase;
  }
}

// The sums of all parts, (H, size).
at::Tensor total(const std::vector<double>& sums, int64_t H, int64_t parts, int64_t size,
                 const at::Tensor& like) {
  at::Tensor out = at::empty({H, size}, like.options());
  float* to = out.data_ptr<float>();
  for (int64_t h = 0; h < H; h++)
    for (int64_t i = 0; i < size; i++) {
      double all = 0;
      for (int64_t part = 0; part < parts; part++) all += sums[(h * parts + part) * size + i];
      *to++ = static_cast<float>(all);
    }
  return out;
}

// The noise, turned; free may be empty.
struct Noise {
  Buffer waves, free;
  int64_t D, K, R;
};

// Writes the gradients of one sample's tokens of a run, and adds to the sums of parameters.
void pull_run(Pull& pull, const Waves& waves, const Noise& noise, const Run& run, Rows x, Rows grads,
              Rows of_x, const float* still, double* sums) {
  const int64_t D = noise.D, K = noise.K, R = noise.R, n = D * K, size = run.size;
  const int64_t axes = static_cast<int64_t>(run.place.size());
  for (int64_t t = 0; t < size; t++) {
    std::copy_n(x[run.first + t], D, pull.x.data() + t * D);
    std::copy_n(grads[run.first + t], R, pull.grads.data() + t * R);
  }
  if (still)
    pull_still(pull, still, noise.free.data(), sums + (2 + axes) * n, size, D, R);
  else
    std::fill(pull.of_x.begin(), pull.of_x.end(), 0.f);
  pull_waves(pull, waves, noise.waves.data(), size, D, K, R);
  add_run(sums, pull, run, n);
  for (int64_t t = 0; t < size; t++) std::copy_n(pull.of_x.data() + t * D, D, of_x[run.first + t]);
}

// Gradients of x, and for each head the sums of `add_run`.
std::tuple<at::Tensor, at::Tensor> encode_backward(
    const at::Tensor& grad, const at::Tensor& x, at::IntArrayRef shape, const at::Tensor& halves,
    const at::Tensor& phases, const at::Tensor& amplitudes, const at::Tensor& waves_noise,
    const std::optional<at::Tensor>& still, const std::optional<at::Tensor>& free) {
  const int64_t B = x.size(0), H = x.size(1), D = x.size(3);
  const int64_t K = waves_noise.size(1) / 2, R = waves_noise.size(2), n = D * K;
  at::Tensor grad_x = host_layout(x, D);
  Noise noise{turn_all(waves_noise), Buffer(free ? R * D : 0), D, K, R};
  if (free) turn(noise.free.data(), free->data_ptr<float>(), R, D, R);
  const std::vector<Run> runs = runs_of(shape, SOME);
  const int64_t count = static_cast<int64_t>(runs.size()), parts = parts_for(H, count);
  const int64_t size = (2 + halves.size(0)) * n + D;
  std::vector<double> sums(H * parts * size);
  over_parts(H, parts, count, [&](int64_t h, int64_t part, int64_t first, int64_t last) {
    Sinusoids sinusoids(halves, phases, h, SOME);
    Waves waves(sinusoids.half_step(), amplitudes.data_ptr<float>() + h * n);
    Pull pull(D, K, R);
    for (int64_t u = first; u < last; u++) {
      u == first ? sinusoids.start(runs[u]) : sinusoids.next(runs[u]);
      waves.at(sinusoids.first());
      for (int64_t b = 0; b < B; b++)
        pull_run(pull, waves, noise, runs[u], rows_of(x, b, h), rows_of(grad, b, h),
                 rows_of(grad_x, b, h), still ? still->data_ptr<float>() + h * D : nullptr,
                 sums.data() + (h * parts + part) * size);
    }
  });
  return {grad_x, total(sums, H, parts, size, x)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def(
      "sines_backward(Tensor grad, Tensor x, SymInt[] shape, Tensor halves, Tensor phases, "
      "Tensor amplitudes, Tensor noise, Tensor? still, Tensor? free) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("sines_backward", &encode_backward);
}

}  // namespace zoo
