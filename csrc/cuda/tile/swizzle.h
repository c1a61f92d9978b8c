// Where the bytes of a shared-memory tile lie after a swizzle: TMA writes them so, the tensor core reads them so.
//
// The 16-byte chunks of a line are permuted by the line's number, so that a column of chunks falls into different
// banks: chunk ^= line mod 2, 4 or 8, in lines of 128 bytes. The same XOR undoes it. (PTX ISA, "Swizzling modes".)
#pragma once
#include <cstdint>

#include "formats.h"

namespace mxmoe::cuda {

enum class Swizzle : uint8_t { kNone, k32B, k64B, k128B };

MXMOE_FACT uint32_t swizzle_bytes(Swizzle s) {  // width of a line of the tile
  return s == Swizzle::kNone ? 16 : s == Swizzle::k32B ? 32 : s == Swizzle::k64B ? 64 : 128;
}

// Of a byte offset (a number, or one of each lane) from a 1024-byte boundary, and its own inverse.
template <typename U>
MXMOE_FACT U swizzled(Swizzle s, U offset) {
  const uint32_t chunks = s == Swizzle::kNone ? 0 : s == Swizzle::k32B ? 1 : s == Swizzle::k64B ? 3 : 7;
  return offset ^ ((offset >> 7 & chunks) << 4);
}

static_assert(swizzled(Swizzle::k128B, 128u + 16u) == 128 &&
              swizzled(Swizzle::k128B, 1024u + 3 * 128) == 1024 + 3 * 128 + 48);

}  // namespace mxmoe::cuda
