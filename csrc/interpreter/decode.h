// Descriptors read back from their bits, by tables of fields taken from the PTX ISA and not from the encoders in
// cuda/tile: what the kernels encode has to mean the same here.
#pragma once
#include <cstdint>
#include <string>

namespace mxmoe::interpreter {

struct Field {
  int first, bits;
  constexpr uint64_t of(uint64_t x) const { return x >> first & ((uint64_t{1} << bits) - 1); }
};

// "Shared memory descriptor" of tcgen05, table 40.
struct SharedDescriptor {
  static constexpr Field kStart{0, 14}, kLeading{16, 14}, kStride{32, 14}, kConstant{46, 3}, kBaseOffset{49, 3},
      kLeadingMode{52, 1}, kZero{53, 8}, kSwizzle{61, 3};
  uint32_t start, leading, stride;  // bytes
  int line_bytes;                   // of the swizzle: 128, 64, 32, or 16 for none
  bool valid;

  // wgmma's: the same first fields, the swizzle in the last two bits (128, 64, 32 bytes as 1, 2, 3), zeros between.
  static constexpr SharedDescriptor of_wgmma(uint64_t d) {
    constexpr Field kMode{62, 2}, kReserved{52, 10}, kNone{46, 3};
    SharedDescriptor s(d);
    s.line_bytes = kMode.of(d) == 1 ? 128 : kMode.of(d) == 2 ? 64 : kMode.of(d) == 3 ? 32 : 16;
    s.valid = !kReserved.of(d) && !kNone.of(d) && !kBaseOffset.of(d);
    return s;
  }

  explicit constexpr SharedDescriptor(uint64_t d)
      : start(static_cast<uint32_t>(kStart.of(d)) * 16),
        leading(static_cast<uint32_t>(kLeading.of(d)) * 16),
        stride(static_cast<uint32_t>(kStride.of(d)) * 16),
        line_bytes(kSwizzle.of(d) == 2   ? 128
                   : kSwizzle.of(d) == 4 ? 64
                   : kSwizzle.of(d) == 6 ? 32
                                         : 16),
        valid(kConstant.of(d) == 1 && !kBaseOffset.of(d) && !kLeadingMode.of(d) && !kZero.of(d) &&
              kSwizzle.of(d) % 2 == 0) {}

  // Where byte `k` of line `line` of a K-major operand is in shared memory. The address bits themselves are swizzled,
  // so that a start inside a line needs nothing special.
  constexpr uint32_t k_major(uint32_t line, uint32_t k) const {
    const uint32_t width = static_cast<uint32_t>(line_bytes);
    const uint32_t across = width == 16 ? k / 16 * leading : 0, inside = width == 16 ? k % 16 : k;
    const uint32_t address = start + line / 8 * stride + line % 8 * width + across + inside;
    return swizzled(address);
  }

  // Where byte `at` along M or N of element `k` of the contraction is, of an MN-major operand.
  constexpr uint32_t mn_major(uint32_t at, uint32_t k) const {
    const uint32_t width = static_cast<uint32_t>(line_bytes);
    return swizzled(start + at / width * leading + at % width + k / 8 * stride + k % 8 * width);
  }

 private:
  constexpr uint32_t swizzled(uint32_t address) const {
    return address ^ ((address >> 7 & (static_cast<uint32_t>(line_bytes) / 16 - 1)) << 4);
  }
};

// "Instruction descriptor" of tcgen05.mma, tables for .kind::f16 and for .kind::mxf8f6f4, mxf4nvf4.
struct InstructionDescriptor {
  static constexpr Field kSparse{0, 3}, kF16Accumulator{4, 2}, kScaleIdB{4, 2}, kA{7, 3}, kB{10, 3}, kNegate{13, 2},
      kMajorA{15, 1}, kMajorB{16, 1}, kN{17, 6}, kScaleType{23, 1}, kF16M{24, 5}, kScaledM{27, 2}, kScaleIdA{29, 2},
      kLongK{31, 1};
  static constexpr uint32_t kF16Reserved = 1u << 6 | 1u << 23 | 1u << 29 | 3u << 30,
                            kScaledReserved = 1u << 6 | 7u << 24;
  uint32_t bits;
  constexpr int n() const { return static_cast<int>(kN.of(bits)) * 8; }
  constexpr int m(bool scaled) const {
    return static_cast<int>(scaled ? kScaledM.of(bits) * 128 : kF16M.of(bits) * 16);
  }
};

}  // namespace mxmoe::interpreter
