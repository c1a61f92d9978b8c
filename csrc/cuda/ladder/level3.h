// Level 3: TMA and an mbarrier. One thread asks for a box of each operand and goes on; the copy engine writes shared
// memory, swizzled, and counts its bytes on the barrier that all wait for. The barrier's phase turns once a step.
#pragma once
#include "cuda/ladder/problem.h"

namespace mxmoe::cuda::level3 {
using ladder::globals;

struct config {
  static constexpr int kRows = 128, kColumns = 16, kWarps = 4;
};
struct shared {
  st<config::kRows, 128, Swizzle::k128B> a;
  st<config::kColumns, 128, Swizzle::k128B> b;
  barrier arrived;
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using F = typename M::template lane<float>;
  auto& s = m.template shared<shared>();
  const auto one = m.elect_one();
  const auto [row, column] = ladder::tile_position<C>(m.cta_idx(), g.columns);
  if (m.warp_idx() == 0) m.mbarrier_init(s.arrived, 1, one), m.fence_mbarrier_init();
  m.syncthreads();
  const auto line = m.template cast<uint32_t>(m.lane_idx() + 32 * m.warp_idx());
  F y[16] = {};
  for (int step = 0; step < g.steps; ++step) {
    if (m.warp_idx() == 0) {
      m.mbarrier_arrive_expect_tx(s.arrived, decltype(s.a)::num_bytes + decltype(s.b)::num_bytes, one);
      m.tma_load(&s.a, g.a_map, step * 64, row, s.arrived, one);
      m.tma_load(&s.b, g.b_map, step * 64, column, s.arrived, one);
    }
    m.mbarrier_wait(s.arrived, static_cast<uint32_t>(step % 2));
    for (uint32_t k = 0; k < 128; k += 4) {
      const auto a = m.ld_shared(m.shared_address(&s.a) + line * 128 + (((line % 8) << 4) ^ k));  // swizzled
      const F low = to_float<Input::kBF16, 0>(m, a), high = to_float<Input::kBF16, 1>(m, a);
      for (uint32_t j = 0; j < 16; ++j) {
        const uint32_t b = m.ld_shared_uniform(m.shared_address(&s.b) + swizzled(Swizzle::k128B, j * 128 + k));
        y[j] = y[j] + low * __builtin_bit_cast(float, b << 16) + high * __builtin_bit_cast(float, b & 0xffff0000u);
      }
    }
    m.syncthreads();  // read, before the next boxes overwrite it
  }
  ladder::store(m, g, row + 32 * m.warp_idx(), column, y);
}

MXMOE_LAUNCHABLE("ladder 3", shared)

}  // namespace mxmoe::cuda::level3
