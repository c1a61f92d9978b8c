// The encoders of csrc/cuda/tile and the decoders here were written apart; what one says, the other has to read.
#include "interpreter/decode.h"

#include "cuda/tile/descriptors.h"

namespace mxmoe::interpreter {
namespace {

using namespace cuda;

constexpr bool reads_back(SharedOperand o) {
  const SharedDescriptor d(tcgen05_descriptor(o));
  return d.valid && d.start == o.address && d.leading == o.leading && d.stride == o.stride &&
         static_cast<uint32_t>(d.line_bytes) == swizzle_bytes(o.swizzle);
}
static_assert(reads_back({0x1c400, 16, 1024, Swizzle::k128B}) && reads_back({0x400, 512, 512, Swizzle::k64B}));
static_assert(reads_back({0x100, 16, 256, Swizzle::k32B}) && reads_back({0x80, 16, 128, Swizzle::kNone}));

// Byte (line, k) of a tile is where TMA's swizzle puts it, also from a start inside a line.
constexpr bool finds_bytes(Swizzle swizzle) {
  const uint32_t width = swizzle_bytes(swizzle), base = 4096;
  for (uint32_t line = 0; line < 24; ++line)
    for (uint32_t k = 0; k < width; k += 8)
      for (uint32_t start = 0; start <= k; start += 32) {
        const SharedDescriptor d(advance(tcgen05_descriptor({base, 16, 8 * width, swizzle}), start));
        if (d.k_major(line, k - start) != base + swizzled(swizzle, line * width + k)) return false;
      }
  return true;
}
static_assert(finds_bytes(Swizzle::k128B) && finds_bytes(Swizzle::k64B) && finds_bytes(Swizzle::k32B));

constexpr InstructionDescriptor scaled{instruction_descriptor_mxf8f6f4({128, 224}, 0, 1, 3)};
static_assert(scaled.m(true) == 128 && scaled.n() == 224 && InstructionDescriptor::kB.of(scaled.bits) == 1 &&
              InstructionDescriptor::kScaleIdA.of(scaled.bits) == 3 &&
              InstructionDescriptor::kScaleIdB.of(scaled.bits) == 3 &&
              InstructionDescriptor::kScaleType.of(scaled.bits) == 1);
constexpr InstructionDescriptor half{instruction_descriptor_f16({128, 64, true, false}, true)};
static_assert(half.m(false) == 128 && half.n() == 64 && InstructionDescriptor::kMajorA.of(half.bits) == 1 &&
              InstructionDescriptor::kMajorB.of(half.bits) == 0 &&
              InstructionDescriptor::kF16Accumulator.of(half.bits) == 1);

}  // namespace
}  // namespace mxmoe::interpreter
