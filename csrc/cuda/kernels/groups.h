// Groups of rows on the device: from the number of a 128-row tile to the group that owns it. Offsets are read here,
// never on the host, so that a launch needs only static bounds.
#pragma once
#include <cstdint>

#include "cuda/tile/types.h"
#include "layout.h"

namespace mxmoe::cuda {

constexpr int kTileRows = static_cast<int>(kGroupAlignment);

// offs (num_groups,) cumulative ends; without offs, groups of equal size (the matrices of a batch).
struct Groups {
  const int32_t* offs;
  int num_groups;
  int group_rows;
  int64_t num_rows;  // of the array

  template <class M>
  MXMOE_KERNEL int64_t end(M& m, int g) const {
    return offs ? m.ld_global_uniform(offs + g) : static_cast<int64_t>(g + 1) * group_rows;
  }
};

// 128 rows of one group, or of the rows past the last group (group == num_groups, no data).
struct RowTile {
  int group;
  int64_t row;         // first row in the array
  int rows;            // how many are the group's
  int64_t first_tile;  // number of the group's first tile: tiles * 128 = its padded start
  int64_t group_tiles;
};

template <class M>
MXMOE_KERNEL RowTile find_row_tile(M& m, const Groups& g, int64_t tile) {
  int64_t start = 0, first = 0;
  for (int group = 0; group < g.num_groups; ++group) {
    const int64_t end = g.end(m, group), tiles = ceil_div(end - start, kTileRows);
    if (tile < first + tiles) {
      const int64_t row = start + (tile - first) * kTileRows;
      return {group, row, static_cast<int>(end - row < kTileRows ? end - row : kTileRows), first, tiles};
    }
    start = end, first += tiles;
  }
  const int64_t row = start + (tile - first) * kTileRows, left = g.num_rows - row;
  return {g.num_groups, row, static_cast<int>(left < 0 ? 0 : left < kTileRows ? left : kTileRows), first, 0};
}

}  // namespace mxmoe::cuda
