// quantize: high precision -> block-scaled copies. What the numbers mean: docs/numerics.md; shapes:
// mxmoe/backends/__init__.py.
#pragma once
#include "formats.h"
#include "host/isa.h"
#include "host/row_tiles.h"
#include "tensor.h"

namespace mxmoe::host {

struct QuantizeCopy {  // contiguous outputs; values == nullptr: not wanted
  uint8_t* values = nullptr;
  uint8_t* scales = nullptr;
  float* global_scale = nullptr;

  explicit operator bool() const { return values != nullptr; }
};

// Rows that a verb makes on the way to their copies, without an array of them in memory. fill writes rows
// [row, row + rows) x columns [col, col + cols) of x's dtype to `out`, densely; with two parts the same columns of the
// second half of each row follow, as a matrix of their own (a gradient has gate and up at once).
struct RowSource {
  void (*fill)(const void* context, int64_t row, int64_t rows, int64_t col, int64_t cols, void* out) = nullptr;
  const void* context = nullptr;
  int64_t parts = 1;  // 2: half a row is a multiple of 32

  explicit operator bool() const { return fill != nullptr; }
};

struct QuantizeArgs {
  Tensor x;          // (B, R, L), any strides
  RowSource source;  // of an x without data: B is 1, no global scale
  Format format;
  Scope scope;
  bool floor, stochastic, hadamard, four_six, block_2d;
  uint64_t seed;
  QuantizeCopy row, column;
  const RowTile* tiles;
  int64_t num_tiles, num_segments;  // segments: global scales of scope tensor (1) or group
  int64_t padded_rows;              // P: contraction length of the column copy
};

}  // namespace mxmoe::host

MXMOE_FOR_EACH_ISA(void quantize(const QuantizeArgs& args, int threads);

                   // The copies of an x that `source` makes.
                   static inline void quantize_from(QuantizeArgs args, const RowSource& source, int threads) {
                     args.source = source;
                     quantize(args, threads);
                   })
