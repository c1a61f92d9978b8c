#pragma once
#include <stdexcept>

#include "cuda/kernels/quantize.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

template <class L>
void run_quantize(L& l, const Tensor& x, const Tensor& offs, const std::string& format, bool floor, bool blocked,
                  const Tensor& row_values, const Tensor& row_scales, const Tensor& column_values,
                  const Tensor& column_scales) {
  const CopyTensors row{row_values, row_scales}, column{column_values, column_scales};
  if (format == "mxfp8") return quantize::launch<E4M3>(l, x, offs, floor, blocked, row, column);
  if (format == "mxfp8_e5m2") return quantize::launch<E5M2>(l, x, offs, floor, blocked, row, column);
  throw std::invalid_argument("no kernel quantizes to " + format);
}

}  // namespace mxmoe::cuda
