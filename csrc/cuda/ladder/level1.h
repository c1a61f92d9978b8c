// Level 1: one warp, plain loads. A lane has one row and sixteen columns of it in registers. Each value of A is loaded
// columns / 16 times, each of B rows / 32 times.
#pragma once
#include "cuda/ladder/problem.h"

namespace mxmoe::cuda::level1 {
using ladder::globals;

struct config {
  static constexpr int kRows = 32, kColumns = 16, kWarps = 1;
};
struct shared {};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using F = typename M::template lane<float>;
  const auto [row, column] = ladder::tile_position<C>(m.cta_idx(), g.columns);
  const int contraction = g.steps * 64;
  F y[16] = {};
  for (int k = 0; k < contraction; ++k) {
    const auto half = m.template ld_global<uint16_t>(g.a + int64_t{row} * contraction + k,
                                                     m.lane_idx() * (contraction * 2), ladder::every_lane(m));
    const F a = to_float<Input::kBF16, 0>(m, m.template cast<uint32_t>(half));
    for (int j = 0; j < 16; ++j) {
      const uint32_t b = m.ld_global_uniform(g.b + int64_t{column + j} * contraction + k);
      y[j] = y[j] + a * __builtin_bit_cast(float, b << 16);
    }
  }
  ladder::store(m, g, row, column, y);
}

MXMOE_LAUNCHABLE("ladder 1", shared)

}  // namespace mxmoe::cuda::level1
