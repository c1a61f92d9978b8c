// Level 5: roles and a ring. One warp asks for boxes, one multiplies, four store the result; between the first two lie
// four slots, so that copies run ahead of the tensor core. A slot has two barriers: it has arrived, it is finished.
#pragma once
#include "cuda/ladder/level4.h"

namespace mxmoe::cuda::level5 {
using ladder::globals;

struct bf16_slots {
  static constexpr int kStages = 4;
  struct slot {
    st<128, 128, Swizzle::k128B> a, b;
  } slots[kStages];
  barrier arrived[kStages], finished[kStages];

  template <class M>
  static MXMOE_KERNEL void produce(M& m, const globals<M>& g, bf16_slots& s, ladder::Position tile, ring<kStages>& at) {
    const auto one = m.elect_one();
    for (int step = 0; step < g.steps; ++step, at.advance()) {
      m.mbarrier_wait(s.finished[at.slot], at.parity ^ 1);  // passes on the first lap
      m.mbarrier_arrive_expect_tx(s.arrived[at.slot], sizeof(slot), one);
      m.tma_load(&s.slots[at.slot].a, g.a_map, step * 64, tile.row, s.arrived[at.slot], one);
      m.tma_load(&s.slots[at.slot].b, g.b_map, step * 64, tile.column, s.arrived[at.slot], one);
    }
  }
  template <class M>
  static MXMOE_KERNEL void issue(M& m, const globals<M>& g, bf16_slots& s, uint32_t, uint32_t d, ring<kStages>& at) {
    for (int step = 0; step < g.steps; ++step, at.advance()) {
      m.mbarrier_wait(s.arrived[at.slot], at.parity);
      level4::multiply(m, s.slots[at.slot], d, step == 0);
      m.tcgen05_commit(s.finished[at.slot], m.elect_one());
    }
  }
};
struct config {
  static constexpr int kRows = 128, kColumns = 128, kWarps = 6;
};
struct shared {
  bf16_slots ring;
  barrier output;
  uint32_t tmem;
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  auto& s = m.template shared<shared>();
  const auto one = m.elect_one();
  const auto tile = ladder::tile_position<C>(m.cta_idx(), g.columns);
  if (m.warp_idx() == 0) {
    for (auto& b : s.ring.arrived) m.mbarrier_init(b, 1, one);
    for (auto& b : s.ring.finished) m.mbarrier_init(b, 1, one);
    m.mbarrier_init(s.output, 1, one), m.fence_mbarrier_init();
  }
  const uint32_t tmem = ladder::allocate(m, s.tmem, 128, 1);
  m.role(m.warp_idx() == 0 ? "producer" : m.warp_idx() == 1 ? "issuer" : "epilogue");
  ring<bf16_slots::kStages> at;
  if (m.warp_idx() == 0) {
    bf16_slots::produce(m, g, s.ring, tile, at);
  } else if (m.warp_idx() == 1) {
    bf16_slots::issue(m, g, s.ring, tmem, tmem, at);
    m.tcgen05_commit(s.output, one);
  } else {
    m.mbarrier_wait(s.output, 0);
    m.tcgen05_fence_after_thread_sync();
    ladder::drain(m, g, tile, tmem);
  }
  ladder::release(m, tmem, 128, 1);
}

MXMOE_LAUNCHABLE("ladder 5", shared)

}  // namespace mxmoe::cuda::level5
