#pragma once
#include <stdexcept>

#include "cuda/kernels/permute.h"
#include "cuda/kernels/unpermute.h"
#include "cuda/kernels/unpermute_backward.h"
#include "cuda/kernels/weights_grad.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

// body.template operator()<E>(): the element of a format's copies, or NoCopies for "".
template <typename Body>
void with_copies(const std::string& format, Body&& body) {
  if (format.empty()) return body.template operator()<NoCopies>();
  if (format == "mxfp8") return body.template operator()<E4M3>();
  if (format == "mxfp8_e5m2") return body.template operator()<E5M2>();
  throw std::invalid_argument("no kernel fuses copies in " + format);
}

template <class L>
void run_permute(L& l, const Tensor& x, const Tensor& permutation, int64_t top_k, const Tensor& offs, const Tensor& out,
                 const std::string& format, bool floor, const Tensor& row_values, const Tensor& row_scales,
                 const Tensor& column_values, const Tensor& column_scales) {
  with_copies(format, [&]<typename E>() {
    permute::launch<E>(l, x, permutation, top_k, offs, floor, out, {row_values, row_scales},
                       {column_values, column_scales});
  });
}

template <class L>
void run_unpermute(L& l, const Tensor& y, const Tensor& inverse, const Tensor& weights, const Tensor& out) {
  unpermute::launch(l, y, inverse, weights, out);
}

template <class L>
void run_unpermute_backward(L& l, const Tensor& dy, const Tensor& permutation, const Tensor& weights, int64_t top_k,
                            const Tensor& offs, const Tensor& rows, const std::string& format, bool floor,
                            const Tensor& row_values, const Tensor& row_scales, const Tensor& column_values,
                            const Tensor& column_scales) {
  with_copies(format, [&]<typename E>() {
    unpermute_backward::launch<E>(l, dy, permutation, weights, top_k, offs, floor, rows, {row_values, row_scales},
                                  {column_values, column_scales});
  });
}

template <class L>
void run_weights_grad(L& l, const Tensor& dy, const Tensor& y, const Tensor& permutation, int64_t top_k,
                      const Tensor& out) {
  weights_grad::launch(l, dy, y, permutation, top_k, out);
}

}  // namespace mxmoe::cuda
