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

}  // namespace mxmoe
