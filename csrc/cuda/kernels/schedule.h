// Which output tiles of a grouped GEMM, or of a grouped weight gradient, a CTA works on, and in which order.
//
// The grid is persistent: CTA i takes tiles i, i + CTAs, ... of all groups laid end to end. Within a group the tiles go
// by supergroups of kSupergroup row tiles, column after column, so that CTAs that run together share rows of A and of B
// in L2. The order is a pure function of sizes; the walk over the groups reads their offsets on the device.
#pragma once
#include <cstdint>

#include "cuda/kernels/groups.h"
#include "cuda/tile/types.h"
#include "tensor.h"

namespace mxmoe::cuda {

struct TilePosition {
  int row, column;
};

// Tile number `i` of row_tiles x column_tiles, and back.
constexpr int kSupergroup = 8;
MXMOE_FACT TilePosition supergroup_tile(int i, int row_tiles, int column_tiles) {
  const int size = kSupergroup * column_tiles, first = i / size * kSupergroup;
  const int height = row_tiles - first < kSupergroup ? row_tiles - first : kSupergroup, inside = i % size;
  return {first + inside % height, inside / height};
}
MXMOE_FACT int supergroup_index(TilePosition t, int row_tiles, int column_tiles) {
  const int first = t.row / kSupergroup * kSupergroup;
  const int height = row_tiles - first < kSupergroup ? row_tiles - first : kSupergroup;
  return first * column_tiles + t.column * height + (t.row - first);
}

static_assert(supergroup_index({9, 2}, 11, 3) == 24 + 2 * 3 + 1 && supergroup_tile(31, 11, 3).row == 9);

struct OutputTile {
  int group;            // num_groups for rows past the last group
  int64_t row;          // first row
  int rows;             // of the group, at most a tile's
  int64_t padded_tile;  // row tile in the blocked scales
  int column_tile;
};

// The tiles of one CTA, in order. Every role of the CTA walks them by itself. Two CTAs of a pair have two row tiles one
// below the other, of which the second may have no rows; then its scales are those of the group's last row tile.
template <int kCtas = 1>
struct TileWalk {
  static constexpr int kRows = kCtas * kTileRows;
  Groups groups;
  int column_tiles;
  int rank;      // of the CTA in its pair
  int64_t next;  // tile number of this CTA's next tile
  int64_t step;  // CTAs or pairs
  int group = 0;
  int64_t start = 0, end = 0;                  // rows of the group
  int64_t first_tile = 0, first_row_tile = 0;  // numbers of its first tile, of its first row tile

  template <class M>
  MXMOE_KERNEL static TileWalk begin(M& m, const Groups& g, int column_tiles) {
    TileWalk w{g, column_tiles, m.cta_idx() % kCtas, m.cta_idx() / kCtas, m.num_ctas() / kCtas};
    w.end = g.num_groups ? g.end(m, 0) : g.num_rows;
    return w;
  }

  template <class M>
  MXMOE_KERNEL bool advance(M& m, OutputTile& tile) {
    for (;;) {
      const int64_t row_tiles = ceil_div(end - start, kRows), tiles = row_tiles * column_tiles;
      const int64_t scale_tiles = ceil_div(end - start, kTileRows);
      if (next < first_tile + tiles) {
        const TilePosition at =
            supergroup_tile(static_cast<int>(next - first_tile), static_cast<int>(row_tiles), column_tiles);
        const int64_t row_tile = int64_t{at.row} * kCtas + rank, row = start + row_tile * kTileRows, left = end - row;
        tile = {group, row,
                static_cast<int>(left < 0           ? 0
                                 : left < kTileRows ? left
                                                    : kTileRows),
                first_row_tile + (row_tile < scale_tiles ? row_tile : scale_tiles - 1), at.column};
        next += step;
        return true;
      }
      if (group == groups.num_groups) return false;
      ++group;
      first_tile += tiles, first_row_tile += scale_tiles;
      start = end, end = group < groups.num_groups ? groups.end(m, group) : groups.num_rows;
    }
  }
};

// The weight gradients of all experts, (experts, rows, columns), each the sum over its group of tokens.
struct Gradients {
  const int32_t* offs;  // (experts,)
  int experts, rows, columns;
  bool padded;  // groups of tokens start at multiples of 128
};

inline Gradients gradients_of(const Tensor& offs, const Tensor& out, bool padded) {
  return {offs.ptr<int32_t>(), static_cast<int>(out.sizes[0]), static_cast<int>(out.sizes[1]),
          static_cast<int>(out.sizes[2]), padded};
}

// One 128 x 128 tile of one of them.
struct GradientTile {
  int expert, row_tile, column_tile;
  int64_t start;  // of the tokens, where the operands have them
  int tokens;
};

// The tiles of one CTA, in order. Every role of the CTA walks them by itself.
struct GradientWalk {
  Gradients g;
  int row_tiles, column_tiles;
  int next, step;  // 32 bits: a division of 64 is a subroutine
  int expert = -1, tokens = 0;
  int64_t start = 0, end = 0;  // start: padded

  template <class M>
  MXMOE_KERNEL static GradientWalk begin(M& m, const Gradients& g) {
    return {g, static_cast<int>(ceil_div(g.rows, kTileRows)), static_cast<int>(ceil_div(g.columns, kTileRows)),
            m.cta_idx(), m.num_ctas()};
  }

  template <class M>
  MXMOE_KERNEL bool advance(M& m, GradientTile& tile) {
    const int tiles = row_tiles * column_tiles, wanted = next / tiles;
    if (wanted >= g.experts) return false;
    for (; expert < wanted; ++expert) {
      start += g.padded ? round_up(tokens, kGroupAlignment) : tokens;
      const int64_t last = m.ld_global_uniform(g.offs + expert + 1);
      tokens = static_cast<int>(last - end), end = last;
    }
    const TilePosition at = supergroup_tile(next % tiles, row_tiles, column_tiles);
    tile = {expert, at.row, at.column, start, tokens};
    next += step;
    return true;
  }
};

}  // namespace mxmoe::cuda
