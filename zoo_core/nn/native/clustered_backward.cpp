// The derivative of clustered.cpp.

#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "clustered.h"
#include "rows.h"
#include "vectors.h"

namespace zoo {
namespace {

constexpr int64_t SOME = 256;  // keys at once: what is kept of them fits L2

// Scores (m, V * W) to weights, by the logs of their denominators.
template <int V>
void weigh_again(Buffer& scores, const vec* masses) {
  for (float *row = scores.data(), *end = row + scores.size(); row < end; row += V * W)
    ZOO_UNROLL for (int v = 0; v < V; v++)
      store(row + W * v, exp2(load(row + W * v) - masses[v]));
}

// Of one head, where the gradients go.
struct Grads {
  Rows of_out, of_q, of_k, of_v;
  Buffer of_rest, of_share, of_means;  // (C, E), (C), (C, D)

  Grads(const Call& x, const at::Tensor& grad, const at::Tensor& grad_q, const at::Tensor& grad_k,
        const at::Tensor& grad_v, int64_t u)
      : of_out(rows_of(grad, u / x.H, u % x.H)),
        of_q(rows_of(grad_q, u / x.H, u % x.H)),
        of_k(rows_of(grad_k, u / x.H, u % x.H)),
        of_v(rows_of(grad_v, u / x.H, u % x.H)),
        of_rest(x.C * x.E, 0.f),
        of_share(x.C, 0.f),
        of_means(x.C * x.D, 0.f) {}
};

// common: of each query, its output times that one's gradient, summed; weights then times `share`.
template <int V>
void halfway(Buffer& scores, const Buffer& of_scores, float share, vec* common) {
  vec total[V] = {};
  const float* of_row = of_scores.data();
  for (float *row = scores.data(), *end = row + scores.size(); row < end;
       row += V * W, of_row += V * W)
    ZOO_UNROLL for (int v = 0; v < V; v++) {
      const vec weight = load(row + W * v);
      total[v] += weight * load(of_row + W * v);
      store(row + W * v, weight * share);
    }
  ZOO_UNROLL for (int v = 0; v < V; v++) common[v] = total[v];
}

// The gradients that n queries of cluster c leave at its top keys, and their own.
void pull_part(Head& head, Grads& grads, int64_t c, const int64_t* at, int64_t n, Buffer& copies) {
  const Call& x = head.x;
  head.score(at, n);
  vec mass[TILE / W] = {}, common[TILE / W];
  for (int64_t i = 0; i < n; i++) mass[i / W][i % W] = head.own[at[i]];
  by_vectors(head.lanes, [&]<int V>() { weigh_again<V>(head.scores, mass); });
  copies.resize(n * std::max(x.D, x.E));
  for (int64_t i = 0; i < n; i++) {
    head.lines[i] = grads.of_out[at[i]];
    std::copy_n(head.lines[i], x.E, copies.data() + i * x.E);
  }
  head.turn(head.grads, n, x.E, 1.f);
  head.against(head.of_scores, head.values, head.grads, x.E);
  by_vectors(head.lanes, [&]<int V>() {
    halfway<V>(head.scores, head.of_scores, head.share[c], common);
  });
  for (int64_t i = 0; i < n; i++) grads.of_share[c] += common[i / W][i % W];
  const int32_t* top = head.top + c * x.T;
  const auto value = [&](int64_t j) { return grads.of_v[head.tokens[top[j]]]; };
  head.spread(value, head.scores, copies.data(), x.E, n, x.E);

  by_vectors(head.lanes, [&]<int V>() { head.pull<V>(common, x.scale); });
  for (int64_t i = 0; i < n; i++) std::copy_n(head.q[at[i]], x.D, copies.data() + i * x.D);
  const auto key_of = [&](int64_t j) { return grads.of_k[head.tokens[top[j]]]; };
  head.spread(key_of, head.of_scores, copies.data(), x.D, n, x.D);
  head.mix(head.of_scores, head.keys, n, x.D);
  for (int64_t i = 0; i < n; i++)
    std::copy_n(head.out.data() + i * x.D, x.D, grads.of_q[at[i]]);
}

// The gradients that all clusters leave at keys and values, and those of the means.
void pull_clusters(Head& head, Grads& grads) {
  const Call& x = head.x;
  const int64_t N = static_cast<int64_t>(head.tokens.size());
  head.over_clusters([&](int64_t c, int64_t n) {
    vec mass[TILE / W] = {}, common[TILE / W] = {};
    int64_t next[TILE] = {};  // of each cluster's top keys
    for (int64_t i = 0; i < n; i++) {
      const float *of_rest = grads.of_rest.data() + (c + i) * x.E, *rest = head.rest + (c + i) * x.E;
      head.lines[i] = of_rest;
      mass[i / W][i % W] = head.mass[c + i];
      common[i / W][i % W] = grads.of_share[c + i] * head.share[c + i] + dot(of_rest, rest, x.E);
    }
    head.turn(head.grads, n, x.E, 1.f);
    for (int64_t first = 0; first < N; first += SOME) {
      const int64_t m = std::min(SOME, N - first);
      head.see_all(first, m);
      head.against(head.scores, head.keys, head.queries, x.D);
      head.against(head.of_scores, head.values, head.grads, x.E);
      by_vectors(head.lanes, [&]<int V>() { weigh_again<V>(head.scores, mass); });
      const auto over_top = [&](int64_t i, int64_t from, auto f) {
        const int32_t* top = head.top + (c + i) * x.T;
        for (; from < head.T && top[from] < first + m; from++) f((top[from] - first) * head.lanes + i);
        return from;
      };
      for (int64_t i = 0; i < n; i++)
        over_top(i, next[i], [&](int64_t at) { head.of_scores[at] = grads.of_share[c + i]; });
      by_vectors(head.lanes, [&]<int V>() { head.pull<V>(common, x.scale); });
      for (int64_t i = 0; i < n; i++)
        next[i] = over_top(i, next[i], [&](int64_t at) { head.scores[at] = 0; });

      const int64_t* tokens = head.tokens.data() + first;
      const auto value = [&](int64_t j) { return grads.of_v[tokens[j]]; };
      head.spread(value, head.scores, grads.of_rest.data() + c * x.E, x.E, n, x.E);
      const auto key = [&](int64_t j) { return grads.of_k[tokens[j]]; };
      head.spread(key, head.of_scores, head.means + c * x.D, x.D, n, x.D);
      head.mix(head.of_scores, head.keys, n, x.D);
      add(grads.of_means.data() + c * x.D, 1.f, head.out.data(), n * x.D);
    }
  });
}

// What a mean leaves at each of its tokens.
void pull_means(const Head& head, Grads& grads) {
  const int64_t D = head.x.D;
  for (int64_t c = 0; c < head.x.C; c++) {
    float* of_mean = grads.of_means.data() + c * D;
    const int64_t size = head.members.size(c);
    for (int64_t d = 0; size && d < D; d += W)
      store(of_mean + d, load(of_mean + d) / static_cast<float>(size));
    for (int64_t i = 0; i < size; i++)
      add(grads.of_q[head.members.order[head.members.start[c] + i]], 1.f, of_mean, D);
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& real, const at::Tensor& index, const at::Tensor& means,
    const at::Tensor& top, const at::Tensor& share, const at::Tensor& rest, const at::Tensor& mass,
    const at::Tensor& own, int64_t topk, double scale) {
  const Call x(q, k, v, index, means, real, topk, scale);
  const Kept kept{top, share, rest, mass, own};
  at::Tensor grad_q = host_layout(q, x.D).zero_(), grad_k = host_layout(k, x.D).zero_();
  at::Tensor grad_v = host_layout(v, x.E).zero_();
  x.over_heads([&](int64_t u, const std::vector<int64_t>& tokens) {
    Head head(x, kept, u, tokens);
    Grads grads(x, grad, grad_q, grad_k, grad_v, u);
    Buffer copies;
    for (int64_t c = 0; c < x.C; c++) {
      head.see_top(c);
      head.members.parts(c, [&](const int64_t* at, int64_t n) {
        for (int64_t i = 0; i < n; i++)
          add(grads.of_rest.data() + c * x.E, 1.f, grads.of_out[at[i]], x.E);
        if (head.T > 0) pull_part(head, grads, c, at, n, copies);
      });
    }
    pull_clusters(head, grads);
    pull_means(head, grads);
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo_core, library) {
  library.def(
      "clustered_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? real, Tensor index, "
      "Tensor means, Tensor top, Tensor share, Tensor rest, Tensor mass, Tensor own, int topk, "
      "float scale) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo_core, CPU, library) {
  library.impl("clustered_backward", &attend_backward);
}

}  // namespace zoo
