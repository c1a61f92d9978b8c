#pragma once
#include "cuda/kernels/quantize_nvfp4.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

template <class L>
void run_quantize_nvfp4(L& l, const Tensor& x, const Tensor& offs, bool blocked, const Tensor& values,
                        const Tensor& scales, const Tensor& global) {
  quantize_nvfp4::launch(l, x, offs, blocked, values, scales, global);
}

}  // namespace mxmoe::cuda
