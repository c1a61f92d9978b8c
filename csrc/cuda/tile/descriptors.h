// What the tensor cores are told: shared-memory descriptors (where an operand lies) and instruction descriptors (what
// to do with it), as integers. PTX ISA, "Shared memory descriptor" of wgmma and tcgen05, "Instruction descriptor".
//
// The interpreter decodes them again with decoders of its own (csrc/interpreter/decode.h); a test compares the bits
// with CUTLASS's structs.
#pragma once
#include <cstdint>

#include "formats.h"
#include "swizzle.h"

namespace mxmoe::cuda {

// An operand in shared memory as the tensor core walks it, in bytes. K-major, swizzled: lines of swizzle_bytes, groups
// of eight lines `stride` apart, `leading` unused. MN-major, swizzled: the contraction walks in groups of eight lines
// `stride` apart, blocks of swizzle_bytes along M or N are `leading` apart.
struct SharedOperand {
  uint32_t address, leading, stride;
  Swizzle swizzle;
};

MXMOE_FACT uint64_t descriptor_field(uint32_t bytes) {
  return (bytes & 0x3ffff) >> 4;
}

MXMOE_FACT uint64_t wgmma_descriptor(SharedOperand o) {
  const uint64_t mode = o.swizzle == Swizzle::kNone   ? 0
                        : o.swizzle == Swizzle::k128B ? 1
                        : o.swizzle == Swizzle::k64B  ? 2
                                                      : 3;
  return descriptor_field(o.address) | descriptor_field(o.leading) << 16 | descriptor_field(o.stride) << 32 |
         mode << 62;
}

MXMOE_FACT uint64_t tcgen05_descriptor(SharedOperand o) {
  const uint64_t mode = o.swizzle == Swizzle::kNone   ? 0
                        : o.swizzle == Swizzle::k128B ? 2
                        : o.swizzle == Swizzle::k64B  ? 4
                                                      : 6;
  return descriptor_field(o.address) | descriptor_field(o.leading) << 16 | descriptor_field(o.stride) << 32 |
         uint64_t{1} << 46 | mode << 61;
}

// The same operand some bytes further along its contraction, inside a swizzled line.
MXMOE_FACT uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Element formats as instruction descriptors number them, by kind.
enum class MmaKind : uint8_t { kF16, kMxf8f6f4, kMxf4nvf4 };

struct MmaShape {
  int m, n;                                     // of the tensor core's tile; m over both CTAs of a pair
  bool a_mn_major = false, b_mn_major = false;  // operands whose lines run along M or N
};

MXMOE_FACT uint32_t instruction_descriptor_f16(MmaShape s, bool bf16) {
  const uint32_t element = bf16 ? 1 : 0, accumulator = 1;  // FP32
  return accumulator << 4 | element << 7 | element << 10 | uint32_t{s.a_mn_major} << 15 | uint32_t{s.b_mn_major} << 16 |
         static_cast<uint32_t>(s.n / 8) << 17 | static_cast<uint32_t>(s.m / 16) << 24;
}

// MXFP8, E4M3 (0) or E5M2 (1) elements, E8M0 scales. `scale_id`: which byte of the scale words is this step's.
MXMOE_FACT uint32_t instruction_descriptor_mxf8f6f4(MmaShape s, uint32_t a_element, uint32_t b_element,
                                                    uint32_t scale_id) {
  return scale_id << 4 | a_element << 7 | b_element << 10 | uint32_t{s.a_mn_major} << 15 |
         uint32_t{s.b_mn_major} << 16 | static_cast<uint32_t>(s.n / 8) << 17 | 1u << 23 |
         static_cast<uint32_t>(s.m / 128) << 27 | scale_id << 29;
}

// NVFP4: E2M1 elements, four E4M3 scales per 64 elements (the whole scale word, so scale_id 0).
MXMOE_FACT uint32_t instruction_descriptor_mxf4nvf4(MmaShape s) {
  return 1u << 7 | 1u << 10 | static_cast<uint32_t>(s.n / 8) << 17 | static_cast<uint32_t>(s.m / 128) << 27;
}

// Block scales in tensor memory, as tcgen05.cp.32x128b.warpx4 lays a 512-byte tile of the blocked layout
// (csrc/layout.h): line r's four scales are the word at lane r % 32 (and again 32, 64, 96 lanes on), column r / 32.
struct ScaleWord {
  int lane, column;
};
MXMOE_FACT ScaleWord scale_word(int line) {
  return {line % 32, line / 32};
}
MXMOE_FACT int scale_line(ScaleWord w) {
  return w.column * 32 + w.lane % 32;
}
static_assert(scale_line(scale_word(77)) == 77);

// wgmma's accumulator: register i of a lane of warp w (of four) is this row and column of the 64 x N tile.
MXMOE_FACT int wgmma_row(int warp, int lane, int i) {
  return 16 * warp + lane / 4 + i / 2 % 2 * 8;
}
MXMOE_FACT int wgmma_column(int lane, int i) {
  return i / 4 * 8 + lane % 4 * 2 + i % 2;
}

// A tensor-memory address: lane in the upper half, column in the lower.
MXMOE_FACT uint32_t tmem_address(uint32_t lane, uint32_t column) {
  return lane << 16 | column;
}

}  // namespace mxmoe::cuda
