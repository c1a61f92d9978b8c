#pragma once
#include <stdexcept>

#include "cuda/kernels/grouped_mm_wgrad_sm90.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

template <class L>
void run_grouped_mm_wgrad_sm90(L& l, const Tensor& a, const Tensor& b, const std::string& format, const Tensor& offs,
                               bool accumulate, const Tensor& out) {
  if (format == "bf16") return grouped_mm_wgrad_sm90::launch<true>(l, a, b, offs, accumulate, out);
  if (format == "fp16") return grouped_mm_wgrad_sm90::launch<false>(l, a, b, offs, accumulate, out);
  throw std::invalid_argument("no kernel of sm_90 multiplies " + format);
}

}  // namespace mxmoe::cuda
