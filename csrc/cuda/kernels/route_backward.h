// route_backward: the gradient of the routing weights, of the mean probabilities and of the mean squared logsumexp with
// respect to the logits. A warp takes a token; the order of the sums is the contract's.
#pragma once
#include "cuda/kernels/router.h"

namespace mxmoe::cuda::route_backward {

template <int kExpertsOfALane>
struct config {
  static constexpr int kWarps = 4, kPerLane = kExpertsOfALane;
};

struct shared {};

template <class M>
struct globals {
  const float* logits;                              // (tokens, experts)
  const int32_t* ids;                               // (tokens, top_k)
  const float *weights_grad, *probs_grad, *z_grad;  // (tokens, top_k), (experts,), (1,), each or null
  int tokens, experts, top_k;
  bool sigmoid, normalize;
  float scale;
  float* out;  // (tokens, experts)
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  using I = typename M::template lane<int>;
  m.role("route_backward");
  const int token = m.cta_idx() * C::kWarps + m.warp_idx();
  if (token >= g.tokens) return;
  const I lane = m.lane_idx();
  const F tokens = m.splat(static_cast<float>(g.tokens));
  const Experts<M, C::kPerLane> experts(m, g.logits + int64_t{token} * g.experts, g.experts, g.sigmoid);
  F grad[C::kPerLane] = {};
  if (g.probs_grad) {
    F probabilities[C::kPerLane], share[C::kPerLane], terms[C::kPerLane];
    experts.probabilities(g.sigmoid, probabilities);
    experts.each([&](int i) {
      const auto exists = experts.id(i) < g.experts;
      share[i] = m.divide(m.template ld_global<float>(g.probs_grad, experts.id(i) * 4, exists), tokens);
      terms[i] = share[i] * probabilities[i];
    });
    const F mean = experts.sum(terms);
    experts.each([&](int i) {
      grad[i] = probabilities[i] * (share[i] - mean);
      if (g.sigmoid) grad[i] = grad[i] * (1.0f - experts.score[i]);
    });
  }
  if (g.z_grad) {
    const F slope = m.divide(experts.logsumexp * (m.ld_global_uniform(g.z_grad) * 2.0f), tokens);
    experts.each([&](int i) { grad[i] = grad[i] + slope * experts.softmax[i]; });
  }
  if (g.weights_grad) {
    const int64_t slots = int64_t{token} * g.top_k;
    const I ids = m.template ld_global<int>(g.ids + slots, lane * 4, lane < g.top_k);
    F given = m.template ld_global<float>(g.weights_grad + slots, lane * 4, lane < g.top_k);
    given = (ids >= 0) & (ids < g.experts) ? given : F{};
    const F selected = experts.scores_of(ids, g.top_k);
    F a;  // dL/ds * s, finite even where scores underflow
    if (g.normalize) {
      const F part = m.divide(selected, sum_ascending(m, selected, g.top_k) + kRouterEpsilon);
      a = (part * (given - sum_ascending(m, given * part, g.top_k))) * g.scale;
    } else {
      a = (selected * given) * g.scale;
    }
    if (g.sigmoid) {
      a = a * (1.0f - selected);
    } else {
      const F total = sum_ascending(m, a, g.top_k);
      experts.each([&](int i) { grad[i] = grad[i] - experts.score[i] * total; });
    }
    for (int k = 0; k < g.top_k; ++k) {
      const int id = m.read_lane(ids, k);
      const float added = m.read_lane(a, k);
      experts.each([&](int i) { grad[i] = experts.id(i) == id ? grad[i] + added : grad[i]; });
    }
  }
  const F nan = __builtin_bit_cast(F, U{} + kNanBits);
  experts.each([&](int i) {
    m.template st_global<float>(g.out + int64_t{token} * g.experts, experts.id(i) * 4, experts.poisoned ? nan : grad[i],
                                experts.id(i) < g.experts);
  });
}

MXMOE_LAUNCHABLE("route_backward", shared)

// logits FP32 (T, E), ids int32 (T, K); weights_grad (T, K), probs_grad (E,), z_grad (1,) FP32 or none; out FP32 (T,
// E).
template <class L>
void launch(L& l, const Tensor& logits, const Tensor& ids, const Tensor& weights_grad, const Tensor& probs_grad,
            const Tensor& z_grad, bool sigmoid, bool normalize, float scale, const Tensor& out) {
  globals<typename L::machine> g{};
  g.logits = logits.ptr<float>(), g.ids = ids.ptr<int32_t>();
  g.weights_grad = weights_grad.ptr<float>(), g.probs_grad = probs_grad.ptr<float>(), g.z_grad = z_grad.ptr<float>();
  g.tokens = static_cast<int>(logits.sizes[0]), g.experts = static_cast<int>(logits.sizes[1]);
  g.top_k = static_cast<int>(ids.sizes[1]);
  g.sigmoid = sigmoid, g.normalize = normalize, g.scale = scale, g.out = out.ptr<float>();
  with_experts_of_a_lane(g.experts, [&]<int kPerLane>() {
    using C = config<kPerLane>;
    l.template run<launchable<C>>(ceil_div(g.tokens, C::kWarps), g,
                                  {{"logits", logits},
                                   {"ids", ids},
                                   {"weights_grad", weights_grad},
                                   {"probs_grad", probs_grad},
                                   {"z_grad", z_grad},
                                   {"logits_grad", out, Use::kWritten}});
  });
}

}  // namespace mxmoe::cuda::route_backward
