// Decoding of elements, block scales and packed pairs to FP32 vectors.
#pragma once
#include "formats.h"
#include "host/simd.h"

namespace mxmoe::host::MXMOE_ISA {

// Codes (one per lane, sign in the top bit of the element) to FP32.
template <typename E>
MXMOE_INLINE f32 decode_elements(u32 code) {
  constexpr uint32_t kSign = 1u << (E::kBits - 1);
  u32 value = decode_magnitude<E, f32, u32>(code & (kSign - 1));
  return from_bits(value | (code & kSign) << (32 - E::kBits));
}

// Block scale bytes to FP32: E8M0, or E4M3 where the format has a global scale.
template <Format kFormat>
MXMOE_INLINE f32 decode_scales(u32 scale) {
  if constexpr (FormatFacts<kFormat>::kGlobalScale) {
    return decode_elements<E4M3>(scale);
  } else {
    return from_bits(e8m0_bits<u32>(scale));
  }
}

// `bytes` packed bytes to 2 * bytes codes, low nibble first.
static inline void unpack_pairs(const uint8_t* packed, int bytes, uint8_t* codes) {
  int i = 0;
  for (; i + kLanes <= bytes; i += kLanes) {
    u16h pair = __builtin_convertvector(load<u8q>(packed + i), u16h);
    pair = (pair | pair << 4) & 0x0f0f;
    memcpy(codes + 2 * i, &pair, sizeof(pair));
  }
  for (; i < bytes; ++i) codes[2 * i] = packed[i] & 15, codes[2 * i + 1] = packed[i] >> 4;
}

}  // namespace mxmoe::host::MXMOE_ISA
