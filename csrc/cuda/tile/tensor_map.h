// What a TMA descriptor says, as the arguments of cuTensorMapEncodeTiled: the driver makes the device's 128 opaque
// bytes of it, the interpreter reads it as it is.
#pragma once
#include <cstdint>

#include "swizzle.h"
#include "tensor.h"

namespace mxmoe::cuda {

// A matrix in global memory, cut into boxes of box_rows x box_columns elements. What lies outside comes as zero and is
// not written.
struct TensorMapArgs {
  void* data = nullptr;            // 16-byte aligned
  uint64_t rows = 0, columns = 0;  // elements
  uint64_t row_bytes = 0;          // from one row to the next: a multiple of 16
  uint32_t box_rows = 0, box_columns = 0;
  uint32_t element_bytes = 1;
  DType dtype = DType::kU8;
  Swizzle swizzle = Swizzle::kNone;  // box_columns * element_bytes is at most its width
};

}  // namespace mxmoe::cuda
