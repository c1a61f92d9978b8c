#pragma once
#include "cuda/kernels/mean_tokens.h"
#include "cuda/kernels/route.h"
#include "cuda/kernels/route_backward.h"
#include "cuda/kernels/sort_by_expert.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

template <class L>
void run_route(L& l, const Tensor& logits, const Tensor& bias, const Tensor& replay, const std::string& score,
               int64_t num_groups, int64_t groups_kept, bool normalize, float scale, std::optional<float> threshold,
               const Tensor& ids, const Tensor& weights, const Tensor& terms, const Tensor& chunks, const Tensor& probs,
               const Tensor& z) {
  route::launch(l, logits, bias, replay, score == "sigmoid", num_groups, groups_kept, normalize, scale, threshold, ids,
                weights, terms);
  if (terms) mean_tokens::launch(l, terms, chunks, probs, z);
}

template <class L>
void run_route_backward(L& l, const Tensor& logits, const Tensor& ids, const Tensor& weights_grad,
                        const Tensor& probs_grad, const Tensor& z_grad, const std::string& score, bool normalize,
                        float scale, const Tensor& logits_grad) {
  route_backward::launch(l, logits, ids, weights_grad, probs_grad, z_grad, score == "sigmoid", normalize, scale,
                         logits_grad);
}

template <class L>
void run_sort_by_expert(L& l, const Tensor& ids, const Tensor& run_counts, const Tensor& counts, const Tensor& offs,
                        const Tensor& permutation, const Tensor& inverse) {
  sort_by_expert::launch(l, ids, run_counts, counts, offs, permutation, inverse);
}

}  // namespace mxmoe::cuda
