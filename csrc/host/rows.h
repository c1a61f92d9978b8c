// Verbs on routed rows on the host. Their definitions are in mxmoe/backends/reference/rows.py.
#pragma once
#include "host/isa.h"
#include "tensor.h"

namespace mxmoe::host {

struct Activation {  // g * sigmoid(alpha * g) * (u + offset), g <= limit, |u| <= limit
  float alpha, limit, offset;
  bool has_limit;
};

}  // namespace mxmoe::host

// Matrices have unit stride along their last axis and any row stride; index arrays are contiguous.
MXMOE_FOR_EACH_ISA(
    void permute(const Tensor& x, const Tensor& permutation, int64_t top_k, const Tensor& out, int threads);
    void unpermute(const Tensor& y, const Tensor& inverse, const Tensor& weights, const Tensor& out, int threads);
    void unpermute_backward(const Tensor& dy, const Tensor& y, const Tensor& permutation, const Tensor& weights,
                            const Tensor& rows_grad, const Tensor& weights_grad, int threads);
    void swiglu(const Tensor& h, const Tensor& offs, const Activation& activation, bool interleaved, const Tensor& out,
                int threads);
    void swiglu_backward(const Tensor& da, const Tensor& h, const Tensor& offs, const Activation& activation,
                         bool interleaved, const Tensor& dh, int threads);)
