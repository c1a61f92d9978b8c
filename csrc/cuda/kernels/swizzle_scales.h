// swizzle_scales: plain (line, block) scales -> the blocked layout, and back. A CTA takes 128 lines, a warp one after
// the other, a lane every 32nd block; of a column copy with groups, whose groups are blocked matrices of their own, it
// takes the blocks of 128 positions of the contraction.
#pragma once
#include "cuda/kernels/groups.h"
#include "cuda/launch.h"
#include "layout.h"

namespace mxmoe::cuda::swizzle_scales {

struct config {
  static constexpr int kWarps = 4;
};

struct shared {};

template <class M>
struct globals {
  uint8_t *plain, *blocked;
  Groups groups;  // of lines; of a column copy of its positions
  int64_t lines, blocks;
  int block;  // elements of one; 0 where lines are grouped, or nothing is
  bool inverse;
};

// The scales of a line, `to` where its first one is in the blocked matrix, which is a multiple of four blocks.
template <class M>
MXMOE_KERNEL void move(M& m, bool inverse, bool exists, uint8_t* plain, uint8_t* to, int blocks) {
  for (int first = 0; first < blocks; first += 32) {
    const auto block = m.lane_idx() + first, at = block / 4 * static_cast<int>(kScaleTileBytes) + block % 4;
    const auto here = block < blocks;
    if (inverse) {
      auto scale = m.splat(uint8_t{0});
      if (exists) scale = m.template ld_global<uint8_t>(to, at, here);
      m.template st_global<uint8_t>(plain, block, scale, here);
    } else if (exists) {
      m.template st_global<uint8_t>(to, at, m.template ld_global<uint8_t>(plain, block, here), here);
    }
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  m.role("swizzle");
  const int64_t row_tile = m.cta_idx();
  const RowTile tile = find_row_tile(m, g.groups, row_tile);
  const bool data = tile.group < g.groups.num_groups;
  if (g.block == 0) {
    const bool grouped = g.groups.offs != nullptr;
    const int64_t first = grouped ? row_tile * kTileRows : tile.row - tile.group * g.lines;
    uint8_t* matrix = g.blocked + (grouped ? 0 : tile.group * blocked_bytes(g.lines, g.blocks));
    for (int i = m.warp_idx(); i < tile.rows; i += C::kWarps)
      move(m, g.inverse, data, g.plain + (tile.row + i) * g.blocks, matrix + blocked_offset(first + i, 0, g.blocks),
           static_cast<int>(g.blocks));
    return;
  }
  const int here = kTileRows / g.block;  // blocks of the tile
  uint8_t* matrix = g.blocked + round_up(g.lines, kTileRows) * tile.first_tile * here;
  for (int64_t line = m.warp_idx(); line < g.lines; line += C::kWarps)
    move(m, g.inverse, data, g.plain + line * g.blocks + row_tile * here,
         matrix + blocked_offset(line, (row_tile - tile.first_tile) * here, tile.group_tiles * here), here);
}

MXMOE_LAUNCHABLE("swizzle_scales", shared)

// plain (B, lines, blocks), blocked (B, bytes), zeros where it is written; offs (E,) with B = 1, or none.
template <class L>
void launch(L& l, const Tensor& plain, const Tensor& blocked, const Tensor& offs, bool column, int64_t block,
            bool inverse) {
  globals<typename L::machine> g{};
  const int64_t batch = plain.sizes[0];
  g.plain = plain.ptr<uint8_t>(), g.blocked = blocked.ptr<uint8_t>(), g.inverse = inverse;
  g.lines = plain.sizes[1], g.blocks = plain.sizes[2];
  const bool positions = column && offs;
  g.block = positions ? static_cast<int>(block) : 0;
  const int64_t rows = positions ? g.blocks * block : g.lines, groups = offs ? offs.sizes[0] : batch;
  g.groups = {offs.ptr<int32_t>(), static_cast<int>(groups), static_cast<int>(rows), batch * rows};
  const int64_t tiles = positions ? rows / kTileRows
                        : offs    ? padded_rows(rows, groups + 1) / kTileRows
                                  : batch * ceil_div(rows, kTileRows);
  l.template run<launchable<config>>(tiles, g,
                                     {{"plain", plain, inverse ? Use::kWritten : Use::kRead},
                                      {"blocked", blocked, inverse ? Use::kRead : Use::kUpdated},
                                      {"offs", offs}});
}

}  // namespace mxmoe::cuda::swizzle_scales
