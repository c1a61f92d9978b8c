#pragma once
#include "cuda/kernels/swiglu.h"
#include "cuda/kernels/swiglu_backward.h"
#include "cuda/verbs/rows.h"

namespace mxmoe::cuda {

template <class L>
void run_swiglu(L& l, const Tensor& h, const Tensor& offs, float alpha, std::optional<float> limit, float offset,
                bool interleaved, const Tensor& out, const std::string& format, bool floor, const Tensor& row_values,
                const Tensor& row_scales, const Tensor& column_values, const Tensor& column_scales) {
  with_copies(format, [&]<typename E>() {
    swiglu::launch<E>(l, h, offs, {alpha, limit.value_or(0.0f), offset, limit.has_value()}, interleaved, floor, out,
                      {row_values, row_scales}, {column_values, column_scales});
  });
}

template <class L>
void run_swiglu_backward(L& l, const Tensor& da, const Tensor& h, const Tensor& offs, float alpha,
                         std::optional<float> limit, float offset, bool interleaved, const Tensor& dh,
                         const std::string& format, bool floor, const Tensor& row_values, const Tensor& row_scales,
                         const Tensor& column_values, const Tensor& column_scales) {
  with_copies(format, [&]<typename E>() {
    swiglu_backward::launch<E>(l, da, h, offs, {alpha, limit.value_or(0.0f), offset, limit.has_value()}, interleaved,
                               floor, dh, {row_values, row_scales}, {column_values, column_scales});
  });
}

}  // namespace mxmoe::cuda
