#pragma once
#include "cuda/kernels/products_fp32.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

template <class L>
void run_grouped_mm_fp32(L& l, const Tensor& a, const Tensor& b, const Tensor& offs, const Tensor& bias,
                         const Tensor& out) {
  products_fp32::launch<false>(l, a, b, offs, bias, false, out);
}

template <class L>
void run_grouped_mm_wgrad_fp32(L& l, const Tensor& a, const Tensor& b, const Tensor& offs, bool accumulate,
                               const Tensor& out) {
  products_fp32::launch<true>(l, a, b, offs, {}, accumulate, out);
}

}  // namespace mxmoe::cuda
