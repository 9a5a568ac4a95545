// Sinusoids of cells of a grid, followed from run to run of cells; see sines.cpp.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

namespace zoo {

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
inline std::vector<Run> runs_of(at::IntArrayRef shape, int64_t most) {
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

// Into how many parts to cut the runs of a head, to keep all threads at work.
inline int64_t parts_for(int64_t H, int64_t runs) {
  const int64_t threads = at::get_num_threads();
  return threads == 1 ? 1 : std::clamp<int64_t>((4 * threads + H - 1) / H, 1, runs);
}

// Runs f(head, part, first run, last run + 1).
template <class F>
void over_parts(int64_t H, int64_t parts, int64_t runs, F f) {
  at::parallel_for(0, H * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; u++) {
      const int64_t part = u % parts;
      f(u / parts, part, runs * part / parts, runs * (part + 1) / parts);
    }
  });
}

}  // namespace zoo
