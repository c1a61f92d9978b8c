// route: from router logits to expert ids and weights. A warp takes a token; docs/numerics.md and the reference backend
// say what is chosen.
//
// Values to choose by become keys, unsigned numbers of the same order, so that one redux.sync finds the largest and
// another the lowest id that has it. What the losses average over tokens is written as a row of a workspace, which
// mean_tokens.h sums.
#pragma once
#include <optional>

#include "cuda/kernels/router.h"

namespace mxmoe::cuda::route {

template <int kExpertsOfALane>
struct config {
  static constexpr int kWarps = 4, kPerLane = kExpertsOfALane;
};

struct shared {};

template <class M>
struct globals {
  const float *logits, *bias;  // (tokens, experts); (experts,) or null
  const int32_t* replay;       // (tokens, top_k) or null
  int tokens, experts, top_k, num_groups, groups_kept;
  bool sigmoid, normalize, has_threshold;
  float scale, threshold;
  int32_t* ids;    // (tokens, top_k)
  float* weights;  // (tokens, top_k)
  float* terms;    // (tokens, experts + 1) or null: probabilities, logsumexp^2
};

// -Inf and NaN are the smallest, above 0, which is the key of what was taken; -0 is 0.
template <class U, class F>
MXMOE_KERNEL U key_of(F x) {
  x = x == x ? x : F{} - __builtin_inff();
  const U bits = __builtin_bit_cast(U, x == 0.0f ? F{} : x);
  return (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;
}
MXMOE_FACT float value_of(uint32_t key) {
  return __builtin_bit_cast(float, key >> 31 ? key & 0x7fffffffu : ~key);
}

// The index 32 i + lane of the largest key, the lowest of equals, which is taken; `key`: what it was.
template <class M, class U, int kPerLane>
MXMOE_KERNEL int take_best(M& m, U (&keys)[kPerLane], uint32_t& key) {
  U best{};
  unrolled<kPerLane>([&](int i) { best = keys[i] > best ? keys[i] : best; });
  key = m.redux_max(best);
  U first = U{} + 32u * kPerLane;
  unrolled<kPerLane>([&](int i) {
    const U index = m.template cast<uint32_t>(m.lane_idx()) + 32u * i;
    first = (keys[i] == key) & (index < first) ? index : first;
  });
  const int taken = static_cast<int>(m.redux_min(first));
  unrolled<kPerLane>([&](int i) { keys[i] = m.lane_idx() + 32 * i == taken ? U{} : keys[i]; });
  return taken;
}

// Leaves only experts of the best groups above -Inf. A group counts the sum of its two best, or the one that it has
// left.
template <class M, class U, int kPerLane>
MXMOE_KERNEL void keep_groups(M& m, U (&keys)[kPerLane], int experts, int num_groups, int groups_kept) {
  using F = typename M::template lane<float>;
  using I = typename M::template lane<int>;
  const int size = experts / num_groups;
  const U masked = key_of<U>(F{} - __builtin_inff());
  U groups[kPerLane], inside[kPerLane];
  const auto only = [&](int group, U other) {  // keys of the group's experts, `other` elsewhere
    unrolled<kPerLane>([&](int i) {
      const I id = m.lane_idx() + 32 * i;
      inside[i] = (id >= group * size) & (id < (group + 1) * size) ? keys[i] : other;
    });
  };
  unrolled<kPerLane>([&](int i) { groups[i] = U{}; });
  for (int group = 0; group < num_groups; ++group) {
    only(group, U{});
    uint32_t best, second;
    take_best(m, inside, best);
    take_best(m, inside, second);
    const float left = value_of(second);
    const U key = key_of<U>(F{} + (value_of(best) + (second == 0 || left == -__builtin_inff() ? 0.0f : left)));
    unrolled<kPerLane>([&](int i) { groups[i] = m.lane_idx() + 32 * i == group ? key : groups[i]; });
  }
  U kept[kPerLane];
  unrolled<kPerLane>([&](int i) { kept[i] = keys[i] == 0u ? U{} : masked; });
  for (int k = 0; k < groups_kept; ++k) {
    uint32_t key;
    only(take_best(m, groups, key), U{});
    unrolled<kPerLane>([&](int i) { kept[i] = inside[i] != 0u ? inside[i] : kept[i]; });
  }
  unrolled<kPerLane>([&](int i) { keys[i] = kept[i]; });
}

// Lane k: the id to use. A replayed expert that scores less than `limit` gives way, in slot order, to the router's own
// in rank order, of those that are neither kept from the replay nor used before.
template <class M, class I, class F>
MXMOE_KERNEL I plausible(M& m, I replay, I own, F replayed, float limit, int experts, int top_k) {
  const I lane = m.lane_idx();
  const auto valid = (replay >= 0) & (replay < experts) & (lane < top_k);
  const auto implausible = valid & (replayed < limit);
  const I kept = valid & (replayed < limit) ? I{} - 1 : replay, gives_way = implausible ? I{} + 1 : I{};
  I ids = replay;
  int rank = 0;
  for (int k = 0; k < top_k; ++k) {
    if (m.read_lane(gives_way, k) == 0) continue;
    int id = m.read_lane(own, rank++);
    while (rank < top_k && m.any((kept == id) & (lane < top_k))) id = m.read_lane(own, rank++);
    ids = lane == k ? I{} + id : ids;
  }
  return ids;
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  using I = typename M::template lane<int>;
  m.role("route");
  const int token = m.cta_idx() * C::kWarps + m.warp_idx();
  if (token >= g.tokens) return;
  const I lane = m.lane_idx();
  const int64_t slots = int64_t{token} * g.top_k;
  const Experts<M, C::kPerLane> experts(m, g.logits + int64_t{token} * g.experts, g.experts, g.sigmoid);
  bool poisoned = experts.poisoned;
  U keys[C::kPerLane] = {};
  experts.each([&](int i) {
    const auto exists = experts.id(i) < g.experts;
    F value = experts.score[i];
    if (g.bias) value = value + m.template ld_global<float>(g.bias, experts.id(i) * 4, exists);
    value = experts.logit[i] == -__builtin_inff() ? experts.logit[i] : value;
    value = experts.logit[i] == experts.logit[i] ? value : experts.logit[i];
    poisoned = poisoned | m.any((value != value) & exists);
    keys[i] = exists ? key_of<U>(value) : U{};
  });
  if (g.groups_kept < g.num_groups) keep_groups(m, keys, g.experts, g.num_groups, g.groups_kept);
  I ids{};
  for (int k = 0; k < g.top_k; ++k) {
    uint32_t key;
    const int id = take_best(m, keys, key);
    ids = lane == k ? I{} + id : ids;
  }
  if (g.replay) {
    const I own = ids;
    ids = m.template ld_global<int>(g.replay + slots, lane * 4, lane < g.top_k);
    if (g.has_threshold && !poisoned) {
      const F scores = experts.scores_of(own, g.top_k);
      float least = m.read_lane(scores, 0);
      for (int k = 1; k < g.top_k; ++k) {
        const float score = m.read_lane(scores, k);
        least = score < least ? score : least;
      }
      ids = plausible(m, ids, own, experts.scores_of(ids, g.top_k), least * g.threshold, g.experts, g.top_k);
    }
  }

  F weights = experts.scores_of(ids, g.top_k);
  if (g.normalize) weights = m.divide(weights, sum_ascending(m, weights, g.top_k) + kRouterEpsilon);
  weights = weights * g.scale;
  const F nan = __builtin_bit_cast(F, U{} + kNanBits);
  if (poisoned) weights = (ids >= 0) & (ids < g.experts) ? nan : weights;
  m.template st_global<int>(g.ids + slots, lane * 4, ids, lane < g.top_k);
  m.template st_global<float>(g.weights + slots, lane * 4, weights, lane < g.top_k);
  if (!g.terms) return;
  float* terms = g.terms + int64_t{token} * (g.experts + 1);
  F probabilities[C::kPerLane];
  experts.probabilities(g.sigmoid, probabilities);
  experts.each([&](int i) {
    m.template st_global<float>(terms, experts.id(i) * 4, poisoned ? nan : probabilities[i], experts.id(i) < g.experts);
  });
  m.template st_global<float>(terms + g.experts, lane * 4, poisoned ? nan : experts.logsumexp * experts.logsumexp,
                              lane == 0);
}

MXMOE_LAUNCHABLE("route", shared)

// logits FP32 (T, E); bias FP32 (E,), replay int32 (T, K), terms FP32 (T, E + 1) or none; ids int32, weights FP32 (T,
// K).
template <class L>
void launch(L& l, const Tensor& logits, const Tensor& bias, const Tensor& replay, bool sigmoid, int64_t num_groups,
            int64_t groups_kept, bool normalize, float scale, std::optional<float> threshold, const Tensor& ids,
            const Tensor& weights, const Tensor& terms) {
  globals<typename L::machine> g{};
  g.logits = logits.ptr<float>(), g.bias = bias.ptr<float>(), g.replay = replay.ptr<int32_t>();
  g.tokens = static_cast<int>(logits.sizes[0]), g.experts = static_cast<int>(logits.sizes[1]);
  g.top_k = static_cast<int>(ids.sizes[1]);
  g.num_groups = static_cast<int>(num_groups), g.groups_kept = static_cast<int>(groups_kept);
  g.sigmoid = sigmoid, g.normalize = normalize, g.has_threshold = threshold.has_value();
  g.scale = scale, g.threshold = threshold.value_or(0.0f);
  g.ids = ids.ptr<int32_t>(), g.weights = weights.ptr<float>(), g.terms = terms.ptr<float>();
  with_experts_of_a_lane(g.experts, [&]<int kPerLane>() {
    using C = config<kPerLane>;
    l.template run<launchable<C>>(ceil_div(g.tokens, C::kWarps), g,
                                  {{"logits", logits},
                                   {"bias", bias},
                                   {"replay", replay},
                                   {"ids", ids, Use::kWritten},
                                   {"weights", weights, Use::kWritten},
                                   {"terms", terms, Use::kWritten}});
  });
}

}  // namespace mxmoe::cuda::route
