// One token's experts over a warp, for the router and its gradient: lane j holds experts j, j + 32, ..., which is the
// order of the contract's sums over experts.
#pragma once
#include "cuda/kernels/arithmetic.h"
#include "cuda/launch.h"
#include "cuda/tile/types.h"
#include "formats.h"

namespace mxmoe::cuda {

constexpr int kMaxExperts = 1024, kMaxTopK = 32;  // in registers; the chosen experts one a lane
constexpr float kRouterEpsilon = 1e-20f;          // keeps 0 / 0 out of the normalisation when every score underflows

// body.template operator()<experts of a lane>().
template <typename Body>
void with_experts_of_a_lane(int64_t experts, Body&& body) {
  if (experts <= 128) return body.template operator()<4>();
  if (experts <= 256) return body.template operator()<8>();
  if (experts <= 512) return body.template operator()<16>();
  return body.template operator()<32>();
}

template <class M, int kPerLane>
struct Experts {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  using I = typename M::template lane<int>;

  M& m;
  int count;
  F logit[kPerLane];    // a masked one -Inf, one that poisons its token (NaN, +Inf) NaN
  F score[kPerLane];    // 0 past the last expert
  F softmax[kPerLane];  // likewise
  F logsumexp;
  bool poisoned;

  template <class Body>
  MXMOE_KERNEL void each(Body body) const {
    unrolled<kPerLane>([&](int i) {
      if (32 * i < count) body(i);
    });
  }
  MXMOE_KERNEL I id(int i) const { return m.lane_idx() + 32 * i; }

  MXMOE_KERNEL Experts(M& machine, const float* logits, int experts, bool sigmoid_score)
      : m(machine), count(experts), poisoned(false) {
    const F nan = __builtin_bit_cast(F, U{} + kNanBits);
    F top = F{} - __builtin_inff(), total{};
    unrolled<kPerLane>([&](int i) { score[i] = softmax[i] = F{}; });
    each([&](int i) {
      const F x = m.template ld_global<float>(logits, id(i) * 4, id(i) < count);
      const auto poisonous = (x != x) | (x == __builtin_inff());
      logit[i] = id(i) < count ? (poisonous ? nan : x) : F{} - __builtin_inff();
      poisoned = poisoned | m.any(poisonous);
      top = logit[i] > top ? logit[i] : top;
    });
    for (int half = 16; half; half /= 2) {
      const F other = m.shfl_xor(top, half);
      top = other > top ? other : top;
    }
    each([&](int i) {
      softmax[i] = exp(m, finite(i) - top);
      total = total + softmax[i];
    });
    total = sum_of_lanes(m, total);
    logsumexp = top + log(m, total);
    each([&](int i) {
      softmax[i] = id(i) < count ? m.divide(softmax[i], total) : F{};
      score[i] = sigmoid_score ? sigmoid(m, finite(i)) : softmax[i];
    });
  }

  // The logit, -Inf where it poisons.
  MXMOE_KERNEL F finite(int i) const { return logit[i] == logit[i] ? logit[i] : F{} - __builtin_inff(); }

  MXMOE_KERNEL F sum(const F (&x)[kPerLane]) const {
    F total{};
    each([&](int i) { total = total + x[i]; });
    return sum_of_lanes(m, total);
  }

  // What the mean over tokens is taken of: softmax, or scores that sum to 1.
  MXMOE_KERNEL void probabilities(bool sigmoid_score, F (&p)[kPerLane]) const {
    const F total = sum(score) + kRouterEpsilon;
    each([&](int i) { p[i] = sigmoid_score ? m.divide(score[i], total) : softmax[i]; });
  }

  // Lane k: the score of expert ids[k], 0 where there is none.
  MXMOE_KERNEL F scores_of(I ids, int top_k) const {
    F picked{};
    for (int k = 0; k < top_k; ++k) {
      const int wanted = m.read_lane(ids, k);
      U bits{};
      each([&](int i) { bits = id(i) == wanted ? __builtin_bit_cast(U, score[i]) : bits; });
      picked = m.lane_idx() == k ? F{} + __builtin_bit_cast(float, m.redux_max(bits)) : picked;
    }
    return picked;
  }
};

// The sum of lanes 0 to top_k - 1, in that order.
template <class M, class F>
MXMOE_KERNEL F sum_ascending(M& m, F x, int top_k) {
  F total{};
  for (int k = 0; k < top_k; ++k) total = total + m.read_lane(x, k);
  return total;
}

}  // namespace mxmoe::cuda
