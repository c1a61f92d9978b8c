// Where bytes lie, as constexpr functions for host and device; mxmoe/layout.py has the same facts. docs/layouts.md
// draws them.
#pragma once
#include <cstdint>

#include "formats.h"

namespace mxmoe {

static constexpr int64_t kGroupAlignment =
    128;  // rows: contraction of a group in a column copy, its lines in blocked scales
static constexpr int64_t kScaleTileRows = 128, kScaleTileBlocks = 4, kScaleTileBytes = 512;

MXMOE_FACT int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
MXMOE_FACT int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

// Static bound of the padded rows of num_rows rows in num_groups groups, a multiple of 128.
MXMOE_FACT int64_t padded_rows(int64_t num_rows, int64_t num_groups) {
  return (num_rows + (kGroupAlignment - 1) * num_groups) / kGroupAlignment * kGroupAlignment;
}

// Blocked ("128x4") scale layout: byte of (line, block) in a matrix of num_blocks blocks per line, and back.
MXMOE_FACT int64_t blocked_offset(int64_t line, int64_t block, int64_t num_blocks) {
  int64_t tile = line / kScaleTileRows * ceil_div(num_blocks, kScaleTileBlocks) + block / kScaleTileBlocks;
  int64_t row = line % kScaleTileRows;
  return tile * kScaleTileBytes + row % 32 * 16 + row / 32 * 4 + block % kScaleTileBlocks;
}
MXMOE_FACT int64_t blocked_bytes(int64_t num_lines, int64_t num_blocks) {
  return ceil_div(num_lines, kScaleTileRows) * ceil_div(num_blocks, kScaleTileBlocks) * kScaleTileBytes;
}
struct ScalePosition {
  int64_t line, block;
};
MXMOE_FACT ScalePosition blocked_position(int64_t offset, int64_t num_blocks) {
  int64_t tiles_across = ceil_div(num_blocks, kScaleTileBlocks), tile = offset / kScaleTileBytes,
          byte = offset % kScaleTileBytes;
  return {tile / tiles_across * kScaleTileRows + byte % 16 / 4 * 32 + byte / 16,
          tile % tiles_across * kScaleTileBlocks + byte % 4};
}

static_assert(blocked_offset(33, 2, 3) == 22 && blocked_offset(99, 0, 3) == 60 && blocked_offset(130, 5, 8) == 1569);
static_assert(blocked_position(1569, 8).line == 130 && blocked_position(1569, 8).block == 5);

// Row copies in panels of 64 lines, for weights that a CPU reads: blocks of 32 elements of all its lines follow each
// other, in a block 32-bit words of 16 lines at a time. Byte of element k of a line of the panel; two 4-bit elements
// share one.
static constexpr int64_t kPanelLines = 64, kPanelBlock = 32;
MXMOE_FACT int64_t panel_offset(int64_t line, int64_t k, int bits) {
  int64_t per_word = 32 / bits, element = k % kPanelBlock, row = line % 16;
  int64_t word = k / kPanelBlock * (kPanelBlock / per_word) + element / per_word;
  int64_t byte = bits == 4 ? row * 4 + element % 8 / 2 : row / 4 * 16 + element % 4 / 2 * 8 + row % 4 * 2 + element % 2;
  return word * kPanelLines * 4 + line / 16 * 64 + byte;
}
// Of its scale, where a block has one.
MXMOE_FACT int64_t panel_scale_offset(int64_t line, int64_t block) {
  return block * kPanelLines + line;
}

static_assert(panel_offset(0, 2, 8) == 8 && panel_offset(1, 0, 8) == 2 && panel_offset(21, 37, 8) == 2387);
static_assert(panel_offset(1, 0, 4) == 4 && panel_offset(21, 37, 4) == 1110);

}  // namespace mxmoe
