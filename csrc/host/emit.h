// From a tile of codes to a copy's bytes: packing, transposition, streaming stores.
#pragma once
#include "host/quantize.h"
#include "host/tile.h"
#include "layout.h"

namespace mxmoe::host::MXMOE_ISA {

// Two codes per byte, the first in the low nibble; count codes, a multiple of 32.
static inline void pack_pairs(const uint8_t* codes, int count, uint8_t* out) {
  for (int i = 0; i < count / 2; i += kLanes) {
    u16h pair;
    memcpy(&pair, codes + 2 * i, sizeof(pair));
    store(out + i, __builtin_convertvector(pair | pair >> 4, u8q));
  }
}

// Where a tile lies in the copy.
struct Position {
  int64_t batch, num_rows, num_cols;  // of the array; num_rows is P for a column copy
  int64_t row, col;                   // of the tile's corner
};

template <Format kFormat>
static void emit_row(const Tile& t, const Position& p, const QuantizeCopy& out) {
  using Facts = FormatFacts<kFormat>;
  constexpr bool kPacked = Facts::Element::kBits == 4;
  const int64_t row_bytes = kPacked ? ceil_div(p.num_cols, 2) : p.num_cols;
  const int64_t row_blocks = ceil_div(p.num_cols, Facts::kBlock);
  const int bytes = kPacked ? (t.valid_cols + 1) / 2 : t.valid_cols, blocks = t.cols / Facts::kBlock;
  const int valid_blocks = static_cast<int>(ceil_div(t.valid_cols, Facts::kBlock));
  alignas(64) uint8_t packed[kTileElements / 2];
  for (int r = 0; r < t.valid_rows; ++r) {
    const int64_t line = p.batch * p.num_rows + p.row + r;
    const uint8_t* from = t.codes + r * t.cols;
    if constexpr (kPacked) {
      pack_pairs(from, t.cols, packed);
      from = packed;
    }
    memcpy(out.values + line * row_bytes + p.col / (kPacked ? 2 : 1), from, bytes);
    memcpy(out.scales + line * row_blocks + p.col / Facts::kBlock, t.blocks.scale + r * blocks, valid_blocks);
  }
}

// rows_to_write: valid rows and the padding after them.
template <Format kFormat>
static void emit_column(const Tile& t, const Position& p, int rows_to_write, const QuantizeCopy& out) {
  using Facts = FormatFacts<kFormat>;
  constexpr int kBlock = Facts::kBlock;
  if constexpr (Facts::Element::kBits == 8) {
    uint8_t* to = out.values + (p.batch * p.num_rows + p.row) * p.num_cols + p.col;
    for (int r = 0; r < rows_to_write; ++r) memcpy(to + r * p.num_cols, t.codes + r * t.cols, t.valid_cols);
  } else {
    constexpr int kBytes = kTileRows / 2;
    alignas(64) uint8_t packed[kTileElements / 2];  // [row pair][column]
    for (int i = 0; i < kBytes; ++i)
      for (int c = 0; c < t.cols; ++c)
        packed[i * t.cols + c] = t.codes[2 * i * t.cols + c] | t.codes[(2 * i + 1) * t.cols + c] << 4;
    const int64_t line_bytes = ceil_div(p.num_rows, 2);
    const int bytes = (rows_to_write + 1) / 2;
    uint8_t* to = out.values + (p.batch * p.num_cols + p.col) * line_bytes + p.row / 2;
    for (int c = 0; c < t.valid_cols; ++c) {
      uint8_t column[kBytes];
      for (int i = 0; i < kBytes; ++i) column[i] = packed[i * t.cols + c];
      memcpy(to + c * line_bytes, column, bytes);
    }
  }
  const int64_t line_blocks = ceil_div(p.num_rows, kBlock);
  uint8_t* to = out.scales + (p.batch * p.num_cols + p.col) * line_blocks + p.row / kBlock;
  for (int k = 0; k * kBlock < rows_to_write; ++k)
    for (int c = 0; c < t.valid_cols; ++c)
      to[c * line_blocks + k] = k * kBlock < t.valid_rows ? t.blocks.scale[k * t.cols + c] : 0;
}

// Rows past the last group.
static inline void zero_rows(const QuantizeArgs& a, const RowTile& tile, int64_t col, int64_t cols) {
  const int64_t num_cols = a.x.sizes[2];
  const int64_t per_byte = 8 / bits_of_element(a.format), block = block_of(a.format);
  const int64_t row_bytes = ceil_div(num_cols, per_byte), row_blocks = ceil_div(num_cols, block);
  for (int64_t r = tile.row; r < tile.row + tile.rows; ++r) {
    memset(a.row.values + r * row_bytes + col / per_byte, 0, ceil_div(cols, per_byte));
    memset(a.row.scales + r * row_blocks + col / block, 0, ceil_div(cols, block));
    if (a.row.global_scale && a.scope == Scope::kRow && col == 0) a.row.global_scale[r] = 0.0f;
  }
}

}  // namespace mxmoe::host::MXMOE_ISA
