// quantize: row copy, column copy or both of 8-bit MX formats, in one pass over the input.
//
// A CTA takes 128 rows of one group x 128 columns: TMA brings the tile to shared memory, where quantize_tile.h takes
// it.
#pragma once
#include "cuda/kernels/quantize_tile.h"

namespace mxmoe::cuda::quantize {

template <typename E, Input kInput>
struct config : tile_config<E, kInput> {};

template <class C>
struct shared : tile_shared<C> {
  barrier x_arrived;
};

template <class M>
struct globals {
  typename M::tensor_map x;  // (rows of all groups, length), boxes of a tile
  Copies copies;
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  const int64_t length = g.copies.length;
  const int column_tiles = static_cast<int>(ceil_div(length, C::kColumns));
  const int64_t row_tile = m.cta_idx() / column_tiles;
  const int column = m.cta_idx() % column_tiles * C::kColumns;
  const RowTile tile = find_row_tile(m, g.copies.groups, row_tile);

  auto& s = m.template shared<shared<C>>();
  m.role("quantize");
  const auto one = m.elect_one();
  if (m.warp_idx() == 0) {
    m.mbarrier_init(s.x_arrived, 1, one);
    m.fence_mbarrier_init();
    m.mbarrier_arrive_expect_tx(s.x_arrived, decltype(s.x)::num_bytes, one);
    m.tma_load(&s.x, g.x, column, static_cast<int>(tile.row), s.x_arrived, one);
  }
  m.syncthreads();
  m.mbarrier_wait(s.x_arrived, 0);
  quantize_tile<C>(m, g.copies, s, tile, row_tile, column, smaller(static_cast<int>(length) - column, C::kColumns));
}

MXMOE_LAUNCHABLE("quantize", shared<C>)

// x (B, R, L), rows 16 bytes apart; offs (E,) with B = 1, or none. Copies without values are not made.
template <typename E, class L>
void launch(L& l, const Tensor& x, const Tensor& offs, bool floor, bool blocked, const CopyTensors& row,
            const CopyTensors& column) {
  globals<typename L::machine> g{};
  g.copies = copies_of(groups_of(offs, x.sizes[0], x.sizes[1]), x.sizes[2], blocked, floor, row, column);
  with_input(x.dtype, [&]<Input kInput>() {
    using C = config<E, kInput>;
    g.x = l.tensor_map(x, C::kRows, C::kColumns * C::kElementBytes, Swizzle::kNone);
    const int64_t ctas = row_tiles(g.copies.groups) * ceil_div(g.copies.length, C::kColumns);
    l.template run<launchable<C>>(ctas, g, written({{"x", x}, {"offs", offs}}, {}, row, column));
  });
}

}  // namespace mxmoe::cuda::quantize
