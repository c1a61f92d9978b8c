// Verbs on routed rows on the host. Their definitions are in mxmoe/backends/reference/rows.py.
#pragma once
#include "host/isa.h"
#include "host/quantize.h"
#include "tensor.h"

namespace mxmoe::host {

struct Activation {  // g * sigmoid(alpha * g) * (u + offset), g <= limit, |u| <= limit
  float alpha, limit, offset;
  bool has_limit;
};

}  // namespace mxmoe::host

// Matrices have unit stride along their last axis and any row stride; index arrays are contiguous. With `copies` a verb
// fills these instead of its output, which is absent: what quantize would make of it. Their x is the output's dtype and
// sizes.
MXMOE_FOR_EACH_ISA(void permute(const Tensor& x, const Tensor& permutation, int64_t top_k, const Tensor& out,
                                const QuantizeArgs* copies, int threads);
                   void unpermute(const Tensor& y, const Tensor& inverse, const Tensor& weights, const Tensor& out,
                                  int threads);
                   void unpermute_backward(const Tensor& dy, const Tensor& y, const Tensor& permutation,
                                           const Tensor& weights, const Tensor& rows_grad, const Tensor& weights_grad,
                                           const QuantizeArgs* copies, int threads);
                   void swiglu(const Tensor& h, const Tensor& offs, const Activation& activation, bool interleaved,
                               const Tensor& out, const QuantizeArgs* copies, int threads);
                   void swiglu_backward(const Tensor& da, const Tensor& h, const Tensor& offs,
                                        const Activation& activation, bool interleaved, const Tensor& dh,
                                        const QuantizeArgs* copies, int threads);)
