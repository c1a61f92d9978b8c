// Where a block-scaled copy has its bytes, whatever its format and axis: for kernels that take a block of one line at a
// time. The scales are plain. Lines are rows, or (column copies) columns; docs/layouts.md draws them.
#pragma once
#include "cuda/kernels/groups.h"
#include "cuda/launch.h"
#include "formats.h"
#include "layout.h"

namespace mxmoe::cuda {

struct ScaledCopy {
  uint8_t *values, *scales;
  float* global;  // NVFP4
  Scope scope;
  bool column, grouped;
  int64_t length, contraction;  // of a row of the source; of a line, padded where there are groups
  int64_t group_rows;           // of a matrix of the batch

  // First position along the contraction of a row tile in a column copy; its matrix in the batch.
  MXMOE_KERNEL int64_t start(const RowTile& tile, int64_t row_tile) const {
    return grouped ? row_tile * kTileRows : tile.row - tile.group * group_rows;
  }
  MXMOE_KERNEL int64_t matrix(const RowTile& tile) const { return grouped ? 0 : tile.group; }
  // Of the values of an 8-bit column copy, which are as the source: its row.
  MXMOE_KERNEL int64_t row(const RowTile& tile, int64_t row_tile) const {
    return grouped ? row_tile * kTileRows : tile.row;
  }
  MXMOE_KERNEL int64_t global_index(const RowTile& tile) const {
    return scope == Scope::kRow ? tile.row : scope == Scope::kGroup ? tile.group : 0;
  }
};

// offs (E,) or none; the copy of x (B, R, L), as mxmoe/backends/__init__.py has it.
inline ScaledCopy scaled_copy_of(const Tensor& offs, int64_t rows, int64_t length, bool column, Scope scope,
                                 const Tensor& values, const Tensor& scales, const Tensor& global) {
  const int64_t padded = offs ? padded_rows(rows, offs.sizes[0]) : rows;
  return {values.ptr<uint8_t>(),
          scales.ptr<uint8_t>(),
          global.ptr<float>(),
          scope,
          column,
          static_cast<bool>(offs),
          length,
          column ? padded : length,
          rows};
}

inline Scope scope_of(const std::string& name) {
  return name == "row" ? Scope::kRow : name == "group" ? Scope::kGroup : Scope::kTensor;
}

// body.template operator()<Format>() for the format of that name.
template <typename Body>
void with_format(const std::string& name, Body&& body) {
  if (name == "mxfp8") body.template operator()<Format::kMxfp8>();
  if (name == "mxfp8_e5m2") body.template operator()<Format::kMxfp8E5m2>();
  if (name == "mxfp4") body.template operator()<Format::kMxfp4>();
  if (name == "nvfp4") body.template operator()<Format::kNvfp4>();
}

}  // namespace mxmoe::cuda
