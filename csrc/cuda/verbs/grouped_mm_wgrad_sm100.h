#pragma once
#include <stdexcept>

#include "cuda/kernels/grouped_mm_wgrad_sm100.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

template <class L>
void run_grouped_mm_wgrad_sm100(L& l, const Tensor& a, const Tensor& a_scales, const std::string& a_format,
                                const Tensor& b, const Tensor& b_scales, const std::string& b_format,
                                const Tensor& offs, bool accumulate, const Tensor& out) {
  namespace mm = grouped_mm_wgrad_sm100;
  const auto kind = [](const std::string& format) { return format == "mxfp8_e5m2" ? "mxfp8" : format; };
  const auto second = [](const std::string& format) { return format == "mxfp8_e5m2" || format == "bf16"; };
  const mm::OperandTensors to_a{a, a_scales, second(a_format)}, to_b{b, b_scales, second(b_format)};
  const std::string both = kind(a_format) == kind(b_format) ? kind(a_format) : "";
  if (both == "mxfp8") return mm::launch<true>(l, to_a, to_b, offs, accumulate, out);
  if (both == "bf16" || both == "fp16") return mm::launch<false>(l, to_a, to_b, offs, accumulate, out);
  throw std::invalid_argument("no kernel multiplies " + a_format + " by " + b_format);
}

}  // namespace mxmoe::cuda
