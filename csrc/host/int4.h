// decode_int4: symmetric 4-bit integers in groups of 32, as checkpoints pack them (mxmoe/checkpoint/encodings.py).
#pragma once
#include "host/isa.h"
#include "tensor.h"

namespace mxmoe::host {

constexpr int kInt4Group = 32;

struct Int4Args {
  const uint8_t* packed;  // (rows, cols / 2): low nibble first, each the integer plus 8
  Tensor scale;           // (rows, cols / 32), contiguous
  Tensor out;             // (rows, cols), contiguous
};

}  // namespace mxmoe::host

MXMOE_FOR_EACH_ISA(void decode_int4(const Int4Args& args, int threads);)
