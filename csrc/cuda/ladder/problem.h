// The ladder: one product written seven times, each level with one idea more, up to the pipeline of grouped_mm_sm100.h.
// docs/kernels.md walks through it.
//
// out (rows, columns) FP32 = a (rows, contraction) times b (columns, contraction) transposed; no tails: sizes are whole
// tiles, the contraction whole slots of 128 bytes. BF16, at level 7 MXFP8 with blocked scales.
#pragma once
#include "cuda/kernels/grouped_mm.h"
#include "cuda/tile/types.h"

namespace mxmoe::cuda::ladder {

template <class M>
struct globals {
  typename M::tensor_map a_map, b_map;  // boxes of a tile's lines x 128 bytes, swizzled
  const uint16_t *a, *b;
  const uint8_t *a_scales, *b_scales;
  float* out;
  int rows, columns, steps;  // steps: slots of the contraction
};

// Where the i-th tile of `out` begins.
struct Position {
  int row, column;
};
template <class C>
MXMOE_FACT Position tile_position(int i, int columns) {
  return {i / (columns / C::kColumns) * C::kRows, i % (columns / C::kColumns) * C::kColumns};
}

template <class M>
MXMOE_KERNEL typename M::pred every_lane(M& m) {
  return m.lane_idx() >= 0;
}

// Sixteen columns of each lane's row of `out`.
template <class M, class F>
MXMOE_KERNEL void store(M& m, const globals<M>& g, int row, int column, const F (&y)[16]) {
  auto* out = reinterpret_cast<uint8_t*>(g.out + int64_t{row} * g.columns + column);
  store_columns<Output::kF32>(m, out, m.lane_idx() * (g.columns * 4), y, 16, true, every_lane(m));
}

// Tensor memory for the CTA, by one of its warps; and back. Each is a barrier of all warps.
template <class M>
MXMOE_KERNEL uint32_t allocate(M& m, const uint32_t& address, uint32_t columns, int warp) {
  if (m.warp_idx() == warp) m.tcgen05_alloc(m.shared_address(&address), columns);
  m.tcgen05_fence_before_thread_sync();
  m.syncthreads();
  m.tcgen05_fence_after_thread_sync();
  return m.ld_shared_uniform(m.shared_address(&address));
}
template <class M>
MXMOE_KERNEL void release(M& m, uint32_t tmem, uint32_t columns, int warp) {
  m.tcgen05_fence_before_thread_sync();
  m.syncthreads();
  m.tcgen05_fence_after_thread_sync();
  if (m.warp_idx() == warp) m.tcgen05_dealloc(tmem, columns);
}

// 128 columns of the 32 lanes of tensor memory that this warp may read, stored as rows of `out`.
template <class M>
MXMOE_KERNEL void drain(M& m, const globals<M>& g, Position tile, uint32_t tmem) {
  using F = typename M::template lane<float>;
  const int quarter = m.warp_idx() % 4 * 32;
  for (int column = 0; column < 128; column += 16) {
    typename M::template registers<uint32_t, 16> d;
    F y[16];
    m.tcgen05_ld(d, tmem + tmem_address(static_cast<uint32_t>(quarter), static_cast<uint32_t>(column)));
    m.tcgen05_wait_ld(d);
    for (int j = 0; j < 16; ++j) y[j] = __builtin_bit_cast(F, d[j]);
    store(m, g, tile.row + quarter, tile.column + column, y);
  }
}

}  // namespace mxmoe::cuda::ladder
