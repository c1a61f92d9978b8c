// Operands of the grouped GEMMs in shared memory: what a slot holds by format, and the ring of slots.
#pragma once
#include <cstdint>

#include "cuda/tile/types.h"
#include "formats.h"
#include "layout.h"

namespace mxmoe::cuda {

enum class Operand : uint8_t { kHalf, kMxfp8, kNvfp4 };  // half: BF16 or FP16

// Of a slot with 128 bytes of contraction. An operand's lines run along the contraction (K-major), or across it.
template <Operand kOperandFormat>
struct operand_facts {
  static constexpr Operand kOperand = kOperandFormat;
  static constexpr bool kHalf = kOperand == Operand::kHalf, kFp4 = kOperand == Operand::kNvfp4;
  static constexpr int kStepBytes = 128;
  static constexpr int kStep = kHalf ? 64 : kFp4 ? 256 : 128;   // elements
  static constexpr int kMapStep = kHalf ? 64 : 128;             // as the maps count them
  static constexpr int kInstruction = kStep / 4;                // elements that a tensor core takes at once
  static constexpr int kScaleTiles = kHalf ? 0 : kFp4 ? 4 : 1;  // of each operand
  static constexpr int kTileElements = kFp4 ? 64 : 128;         // contraction of a scale tile: four blocks

  // Tiles of a slot when so many elements of the contraction are left.
  MXMOE_FACT uint32_t scale_tiles(int64_t left) {
    const int64_t tiles = ceil_div(left, kTileElements);
    return static_cast<uint32_t>(tiles < kScaleTiles ? tiles : kScaleTiles);
  }
};

template <int kTiles>
struct slot_scales {
  scale_tile a_scales[kTiles], b_scales[kTiles];
};
template <>
struct slot_scales<0> {};

template <class Layout>
struct operand_slot : slot_scales<Layout::kScaleTiles> {
  typename Layout::a_tile a[Layout::kABlocks];
  typename Layout::b_tile b[Layout::kBBlocks];
};

// arrived: bytes, or arrivals of those who write; finished: of those who read.
template <class Layout>
struct operand_ring {
  operand_slot<Layout> slots[Layout::kStages];
  barrier arrived[Layout::kStages], finished[Layout::kStages];
};

}  // namespace mxmoe::cuda
