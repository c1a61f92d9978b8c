#pragma once
#include <stdexcept>

#include "cuda/kernels/grouped_mm_sm100.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

template <class L>
void run_grouped_mm_sm100(L& l, const Tensor& a, const Tensor& a_scales, const Tensor& a_global,
                          const std::string& a_format, const Tensor& b, const Tensor& b_scales, const Tensor& b_global,
                          const std::string& b_format, bool b_columns, const Tensor& offs, const Tensor& bias,
                          const Tensor& out) {
  namespace mm = grouped_mm_sm100;
  const auto operand = [](const Tensor& values, const Tensor& scales, const Tensor& global, const std::string& format) {
    return mm::OperandTensors{values, scales, global, format == "mxfp8_e5m2" || format == "bf16"};
  };
  const auto kind = [](const std::string& format) { return format == "mxfp8_e5m2" ? "mxfp8" : format; };
  const auto to_a = operand(a, a_scales, a_global, a_format), to_b = operand(b, b_scales, b_global, b_format);
  const std::string both = kind(a_format) == kind(b_format) ? kind(a_format) : "";
  if (both == "mxfp8") return mm::launch<mm::Operand::kMxfp8>(l, to_a, to_b, b_columns, offs, bias, out);
  if (both == "nvfp4") return mm::launch<mm::Operand::kNvfp4>(l, to_a, to_b, b_columns, offs, bias, out);
  if (both == "bf16" || both == "fp16")
    return mm::launch<mm::Operand::kHalf>(l, to_a, to_b, b_columns, offs, bias, out);
  throw std::invalid_argument("no kernel multiplies " + a_format + " by " + b_format);
}

}  // namespace mxmoe::cuda
