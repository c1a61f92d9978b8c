#pragma once
#include "cuda/kernels/grouped_mm_sm90.h"
#include "cuda/verbs.h"
#include "cuda/verbs/formats.h"

namespace mxmoe::cuda {

template <class L>
void run_grouped_mm_sm90(L& l, const Tensor& a, const Tensor& a_scales, const Tensor& a_global,
                         const std::string& a_format, const Tensor& b, const Tensor& b_scales, const Tensor& b_global,
                         const std::string& b_format, bool b_columns, const Tensor& offs, const Tensor& bias,
                         const Tensor& arrived, int64_t minibatch, const Tensor& out) {
  namespace mm = grouped_mm_sm90;
  const std::string kind = kind_of_both(a_format, b_format);
  const mm::OperandTensors to_a{a, a_scales, a_global, element_of(a_format)},
      to_b{b, b_scales, b_global, element_of(b_format)};
  if (kind == "mxfp8")
    return mm::launch<Operand::kMxfp8, true>(l, to_a, to_b, b_columns, offs, bias, arrived, minibatch, out);
  if (kind == "nvfp4")
    return mm::launch<Operand::kNvfp4, true>(l, to_a, to_b, b_columns, offs, bias, arrived, minibatch, out);
  if (kind == "bf16")
    return mm::launch<Operand::kHalf, true>(l, to_a, to_b, b_columns, offs, bias, arrived, minibatch, out);
  if (kind == "fp16")
    return mm::launch<Operand::kHalf, false>(l, to_a, to_b, b_columns, offs, bias, arrived, minibatch, out);
  refuse(kind);
}

}  // namespace mxmoe::cuda
