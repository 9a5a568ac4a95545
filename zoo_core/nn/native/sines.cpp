// Queries or keys times random codes of positions that are sums of sinusoids; see
// plugins/zoo_attention/spe/sines.py, which computes the same by single operations.
//
//     out_nr = sum_d x_nd (f_d F_dr + sum_k a_dk (cos(w_dk n + o_dk) C_dkr + sin(w_dk n + o_dk) S_dkr))
//
// Around the middle of a run of tokens, cosines are even and sines are odd: with the noise turned to
// that middle, two tokens at the same distance from it share all products but the last,
//
//     code(+t) = E + O,   code(-t) = E - O,   E = F + sum_k cos(w t) C',   O = sum_k sin(w t) S'.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "rows.h"
#include "vectors.h"

namespace zoo {
namespace {

constexpr int64_t PAIRS = 48;   // of tokens in a run: a sample's results fit L1
constexpr int64_t SAMPLES = 2;  // that share the codes of a run
constexpr int64_t SOME = 32;    // tokens in a run backward: their products with noise fit L1

// Complex numbers of length one, or so: one for each sinusoid of a head.
struct Turns {
  std::vector<double> re, im;

  Turns(const double* from, int64_t n) : re(from, from + n), im(from + n, from + 2 * n) {}
  void by(const Turns& other) {
    for (size_t i = 0; i < re.size(); i++) {
      const double x = re[i] * other.re[i] - im[i] * other.im[i];
      im[i] = re[i] * other.im[i] + im[i] * other.re[i], re[i] = x;
    }
  }
  // Times base to the power n.
  void by_power(Turns base, int64_t n) {
    for (; n > 0; n /= 2) {
      if (n % 2) by(base);
      if (n > 1) base.by(base);
    }
  }
};

// Some cells that lie side by side on the last axis. place: on the other axes, and which run of its
// row it is.
struct Run {
  int64_t first, begin, size;
  std::vector<int64_t> place;
};

// Runs of so many cells, or what is left of a row.
std::vector<Run> runs_of(at::IntArrayRef shape, int64_t most) {
  const int64_t axes = static_cast<int64_t>(shape.size()), width = shape[axes - 1];
  int64_t rows = width > 0;
  for (int64_t a = 0; a + 1 < axes; a++) rows *= shape[a];
  std::vector<Run> runs;
  for (int64_t row = 0; row < rows; row++) {
    std::vector<int64_t> place(axes);
    for (int64_t a = axes - 2, left = row; a >= 0; left /= shape[a--]) place[a] = left % shape[a];
    for (int64_t at = 0; at < width; at += most, place[axes - 1]++)
      runs.push_back({row * width + at, at, std::min(most, width - at), place});
  }
  return runs;
}

// The sinusoids of one head, followed from run to run.
// halves (axes, H, 2, n): of half a step on each axis; phases (H, 2, n).
class Sinusoids {
  std::vector<Turns> steps, reached;  // on each axis, from one place to the next; up to each axis
  Turns phases, half, to_middle;      // half a step on the last axis
  int64_t pairs = 0;

 public:
  // most: cells in a run.
  Sinusoids(const at::Tensor& halves, const at::Tensor& phase, int64_t h, int64_t most)
      : phases(phase.data_ptr<double>() + h * 2 * halves.size(3), halves.size(3)),
        half(phases), to_middle(phases) {
    const int64_t axes = halves.size(0), H = halves.size(1), n = halves.size(3);
    for (int64_t a = 0; a < axes; a++) {
      half = Turns(halves.data_ptr<double>() + (a * H + h) * 2 * n, n);
      steps.push_back(half);
      steps.back().by_power(half, a + 1 < axes ? 1 : 2 * most - 1);
    }
  }
  const Turns& half_step() const { return half; }
  // Goes to a run from nowhere, and from one run to the next.
  void start(const Run& run) {
    reached.clear();
    for (size_t a = 0; a < steps.size(); a++) {
      reached.push_back(a ? reached[a - 1] : phases);
      reached[a].by_power(steps[a], run.place[a]);
    }
  }
  void next(const Run& run) {
    size_t a = steps.size() - 1;
    while (run.place[a] == 0) a--;
    reached[a].by(steps[a]);
    for (a++; a < steps.size(); a++) reached[a] = reached[a - 1];
  }
  // At the first cell of the run, and at the middle of the first so many pairs of them.
  const Turns& first() const { return reached.back(); }
  Turns middle(int64_t of_pairs) {
    if (of_pairs != pairs) {
      to_middle = half;
      to_middle.by_power(half, 2 * of_pairs - 2);
      pairs = of_pairs;
    }
    Turns out = reached.back();
    out.by(to_middle);
    return out;
  }
};

// Runs f(head, part, first run, last run + 1), for parts that keep all threads at work.
int64_t parts_for(int64_t H, int64_t runs) {
  const int64_t threads = at::get_num_threads();
  return threads == 1 ? 1 : std::clamp<int64_t>((4 * threads + H - 1) / H, 1, runs);
}

template <class F>
void over_heads(int64_t H, int64_t parts, int64_t runs, F f) {
  at::parallel_for(0, H * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; u++) {
      const int64_t part = u % parts;
      f(u / parts, part, runs * part / parts, runs * (part + 1) / parts);
    }
  });
}

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
      block.template operator()<3>(), block.template operator()<2>(), block.template operator()<1>();
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
  const int64_t count = static_cast<int64_t>(runs.size()), parts = parts_for(H, count);
  over_heads(H, parts, count, [&](int64_t h, int64_t, int64_t first, int64_t last) {
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
        (samples == 2 ? encode_run<2> : encode_run<1>)(work, distances, re.data(), im.data(), noise.data_ptr<float>(),
                   still ? still->data_ptr<float>() + h * D : nullptr,
                   free ? free->data_ptr<float>() : nullptr, pairs, D, K, R);
        for (int64_t i = 0; i < samples; i++)
          give(work.out.data() + i * 2 * PAIRS * R, rows_of(out, b + i, h), runs[u], pairs, R);
      }
    }
  });
  return out;
}

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
  std::vector<const float*> some(D);
  for (int64_t k = 0; k < rows / 2; k++)
    for (int64_t half = 0; half < 2; half++) {
      for (int64_t d = 0; d < D; d++)
        some[d] = noise.data_ptr<float>() + (d * rows + half * (rows / 2) + k) * R;
      turn_rows(out.data() + (2 * k + half) * R * D, D, some.data(), D, R, 1.f);
    }
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

std::tuple<at::Tensor, at::Tensor> encode_backward(
    const at::Tensor& grad, const at::Tensor& x, at::IntArrayRef shape, const at::Tensor& halves,
    const at::Tensor& phases, const at::Tensor& amplitudes, const at::Tensor& noise,
    const std::optional<at::Tensor>& still, const std::optional<at::Tensor>& free) {
  const int64_t B = x.size(0), H = x.size(1), D = x.size(3);
  const int64_t K = noise.size(1) / 2, R = noise.size(2), n = D * K, axes = halves.size(0);
  at::Tensor grad_x = host_layout(x, D);
  const Buffer turned = turn_all(noise);
  Buffer turned_free(R * D);
  if (free) {
    std::vector<const float*> rows(D);
    for (int64_t d = 0; d < D; d++) rows[d] = free->data_ptr<float>() + d * R;
    turn_rows(turned_free.data(), D, rows.data(), D, R, 1.f);
  }
  const std::vector<Run> runs = runs_of(shape, SOME);
  const int64_t count = static_cast<int64_t>(runs.size()), parts = parts_for(H, count);
  const int64_t size = (2 + axes) * n + D;
  std::vector<double> sums(H * parts * size);
  over_heads(H, parts, count, [&](int64_t h, int64_t part, int64_t first, int64_t last) {
    Sinusoids sinusoids(halves, phases, h, SOME);
    Waves waves(sinusoids.half_step(), amplitudes.data_ptr<float>() + h * n);
    Pull pull(D, K, R);
    double* own = sums.data() + (h * parts + part) * size;
    for (int64_t u = first; u < last; u++) {
      const Run& run = runs[u];
      u == first ? sinusoids.start(run) : sinusoids.next(run);
      waves.at(sinusoids.first());
      for (int64_t b = 0; b < B; b++) {
        const Rows tokens = rows_of(x, b, h).from(run.first), grads = rows_of(grad, b, h).from(run.first);
        for (int64_t t = 0; t < run.size; t++) {
          std::copy_n(tokens[t], D, pull.x.data() + t * D);
          std::copy_n(grads[t], R, pull.grads.data() + t * R);
        }
        if (still)
          pull_still(pull, still->data_ptr<float>() + h * D, turned_free.data(), own + (2 + axes) * n,
                     run.size, D, R);
        else
          std::fill(pull.of_x.begin(), pull.of_x.end(), 0.f);
        pull_waves(pull, waves, turned.data(), run.size, D, K, R);
        add_run(own, pull, run, n);
        const Rows to = rows_of(grad_x, b, h).from(run.first);
        for (int64_t t = 0; t < run.size; t++) std::copy_n(pull.of_x.data() + t * D, D, to[t]);
      }
    }
  });
  return {grad_x, total(sums, H, parts, size, x)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def(
      "sines(Tensor x, int[] shape, Tensor halves, Tensor phases, Tensor amplitudes, Tensor noise, "
      "Tensor? still, Tensor? free) -> Tensor");
  library.def(
      "sines_backward(Tensor grad, Tensor x, int[] shape, Tensor halves, Tensor phases, "
      "Tensor amplitudes, Tensor noise, Tensor? still, Tensor? free) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("sines", &encode);
  library.impl("sines_backward", &encode_backward);
}

}  // namespace zoo
