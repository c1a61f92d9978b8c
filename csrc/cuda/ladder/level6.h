// Level 6: persistent CTAs and two accumulators. A CTA goes from tile to tile; while four warps store one accumulator,
// the tensor core fills the other, and the producer is already at the next tile.
#pragma once
#include "cuda/ladder/level5.h"

namespace mxmoe::cuda::level6 {
using ladder::globals;

struct config {
  static constexpr int kRows = 128, kColumns = 128, kWarps = 6;
  using slots = level5::bf16_slots;
};
template <class C>
struct shared {
  typename C::slots ring;
  barrier output_arrived[2], output_finished[2];
  uint32_t tmem;
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  auto& s = m.template shared<shared<C>>();
  const auto one = m.elect_one();
  if (m.warp_idx() == 0) {
    for (auto& b : s.ring.arrived) m.mbarrier_init(b, 1, one);
    for (auto& b : s.ring.finished) m.mbarrier_init(b, 1, one);
    for (auto& b : s.output_arrived) m.mbarrier_init(b, 1, one);
    for (auto& b : s.output_finished) m.mbarrier_init(b, 4, one);
    m.fence_mbarrier_init();
  }
  const uint32_t tmem = ladder::allocate(m, s.tmem, 512, 1);
  m.role(m.warp_idx() == 0 ? "producer" : m.warp_idx() == 1 ? "issuer" : "epilogue");
  ring<C::slots::kStages> at;
  ring<2> output;
  for (int i = m.cta_idx(); i < g.rows / C::kRows * (g.columns / C::kColumns); i += m.num_ctas(), output.advance()) {
    const auto tile = ladder::tile_position<C>(i, g.columns);
    const uint32_t d = tmem + static_cast<uint32_t>(output.slot * C::kColumns);
    if (m.warp_idx() == 0) {
      C::slots::produce(m, g, s.ring, tile, at);
    } else if (m.warp_idx() == 1) {
      m.mbarrier_wait(s.output_finished[output.slot], output.parity ^ 1);
      m.tcgen05_fence_after_thread_sync();
      C::slots::issue(m, g, s.ring, tmem, d, at);
      m.tcgen05_commit(s.output_arrived[output.slot], one);
    } else {
      m.mbarrier_wait(s.output_arrived[output.slot], output.parity);
      m.tcgen05_fence_after_thread_sync();
      ladder::drain(m, g, tile, d);
      m.tcgen05_fence_before_thread_sync();
      m.mbarrier_arrive(s.output_finished[output.slot], one);
    }
  }
  ladder::release(m, tmem, 512, 1);
}

MXMOE_LAUNCHABLE("ladder 6", shared<C>)

}  // namespace mxmoe::cuda::level6
