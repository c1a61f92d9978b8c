// The copies that a verb quantizes: from tensors and option names to QuantizeArgs.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "host/quantize.h"
#include "layout.h"
#include "tensor.h"

namespace mxmoe {

inline Format format_of(const std::string& name) {
  if (name == "mxfp8") return Format::kMxfp8;
  if (name == "mxfp8_e5m2") return Format::kMxfp8E5m2;
  if (name == "mxfp4") return Format::kMxfp4;
  if (name == "nvfp4") return Format::kNvfp4;
  throw std::invalid_argument("unknown format " + name);
}

inline host::QuantizeCopy copy_of(const Tensor& values, const Tensor& scales, const Tensor& global_scale = {}) {
  return {values.ptr<uint8_t>(), scales.ptr<uint8_t>(), global_scale.ptr<float>()};
}

// Owns the tiles that its args point to.
struct CopiesArgs {
  std::vector<host::RowTile> tiles;
  host::QuantizeArgs args{};

  // x (B, R, L); without data where a verb makes its rows.
  CopiesArgs(const Tensor& x, const Tensor& offs, Format format, bool floor, const host::QuantizeCopy& row,
             const host::QuantizeCopy& column) {
    const int64_t num_groups = offs ? offs.sizes[0] : x.sizes[0];
    tiles = host::row_tiles(x.sizes[0], x.sizes[1], offs.ptr<int32_t>(), num_groups, column ? 128 : 32);
    args.x = x, args.format = format, args.floor = floor;
    args.row = row, args.column = column;
    args.tiles = tiles.data(), args.num_tiles = static_cast<int64_t>(tiles.size());
    args.num_segments = num_groups;
    args.padded_rows = offs ? padded_rows(x.sizes[1], num_groups) : x.sizes[1];
  }
};

}  // namespace mxmoe
