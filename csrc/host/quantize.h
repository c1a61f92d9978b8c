// quantize: high precision -> block-scaled copies. What the numbers mean: docs/numerics.md; shapes:
// mxmoe/backends/__init__.py.
#pragma once
#include "formats.h"
#include "host/isa.h"
#include "host/row_tiles.h"
#include "tensor.h"

namespace mxmoe::host {

struct QuantizeCopy {  // contiguous outputs; values == nullptr: not wanted
  uint8_t* values = nullptr;
  uint8_t* scales = nullptr;
  float* global_scale = nullptr;

  explicit operator bool() const { return values != nullptr; }
};

struct QuantizeArgs {
  Tensor x;  // (B, R, L), any strides
  Format format;
  Scope scope;
  bool floor, stochastic, hadamard, four_six, block_2d;
  uint64_t seed;
  QuantizeCopy row, column;
  const RowTile* tiles;
  int64_t num_tiles, num_segments;  // segments: global scales of scope tensor (1) or group
  int64_t padded_rows;              // P: contraction length of the column copy
};

}  // namespace mxmoe::host

MXMOE_FOR_EACH_ISA(void quantize(const QuantizeArgs& args, int threads);)
