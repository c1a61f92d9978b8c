// dequantize: one block-scaled copy -> FP32, BF16 or FP16. Shapes: mxmoe/backends/__init__.py.
#pragma once
#include "formats.h"
#include "host/isa.h"
#include "host/row_tiles.h"
#include "tensor.h"

namespace mxmoe::host {

struct DequantizeArgs {
  const uint8_t* values;
  const uint8_t* scales;
  const float* global_scale;  // nullptr for MX formats
  Tensor out;                 // (B, R, L), any strides
  Format format;
  Scope scope;
  bool column;
  const RowTile* tiles;
  int64_t num_tiles;
  int64_t padded_rows;  // P: contraction length of a column copy
};

}  // namespace mxmoe::host

MXMOE_FOR_EACH_ISA(void dequantize(const DequantizeArgs& args, int threads);)
