// What tiles of a few rows have in common.
#pragma once
#include "host/gemm/tile.h"

namespace mxmoe::host::MXMOE_ISA {

MXMOE_INLINE int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Memory that is read soon.
struct Fetch {
  Ahead values, scales;
};

}  // namespace mxmoe::host::MXMOE_ISA
