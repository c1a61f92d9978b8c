// The router on the host: route, sort_by_expert, route_backward. Their definitions are in
// mxmoe/backends/reference/route.py.
#pragma once
#include <cstdint>

#include "host/isa.h"

namespace mxmoe::host {

struct RouteArgs {        // every array contiguous; nullptr where optional and absent
  const float* logits;    // [num_tokens][num_experts]
  const float* bias;      // [num_experts], optional
  const int32_t* replay;  // [num_tokens][top_k], optional
  int64_t num_tokens, num_experts, top_k;
  bool sigmoid;  // else softmax
  int64_t num_groups, groups_kept;
  bool normalize;
  float scale;
  bool filter_replay;
  float replay_threshold;
  int32_t* ids;    // [num_tokens][top_k]
  float* weights;  // [num_tokens][top_k]
  float* probs;    // [num_experts], optional
  float* z;        // [1], optional
};

struct RouteBackwardArgs {
  const float* logits;        // [num_tokens][num_experts]
  const int32_t* ids;         // [num_tokens][top_k]
  const float* weights_grad;  // [num_tokens][top_k], optional
  const float* probs_grad;    // [num_experts], optional
  const float* z_grad;        // [1], optional
  int64_t num_tokens, num_experts, top_k;
  bool sigmoid, normalize;
  float scale;
  float* logits_grad;  // [num_tokens][num_experts]
};

// Counting sort of num_slots expert ids: counts, offs [num_experts], permutation, inverse [num_slots].
void sort_by_expert(const int32_t* ids, int64_t num_slots, int64_t num_experts, int32_t* counts, int32_t* offs,
                    int32_t* permutation, int32_t* inverse, int threads);

}  // namespace mxmoe::host

MXMOE_FOR_EACH_ISA(void route(const RouteArgs& args, int threads);
                   void route_backward(const RouteBackwardArgs& args, int threads);)
