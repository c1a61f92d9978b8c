// Level 4: the tensor core. One thread's tcgen05.mma multiplies 128 x 128 by 32 bytes of contraction out of shared
// memory into tensor memory; tcgen05.commit arrives on a barrier when all it was given is done. Four warps then read
// the result, each the 32 lanes that it may.
#pragma once
#include "cuda/ladder/problem.h"

namespace mxmoe::cuda::level4 {
using ladder::globals;

struct config {
  static constexpr int kRows = 128, kColumns = 128, kWarps = 4;
};
struct shared {
  st<128, 128, Swizzle::k128B> a, b;
  barrier arrived, multiplied;
  uint32_t tmem;
};

// A slot of BF16: four steps of 32 bytes.
template <class M, class Slot>
MXMOE_KERNEL void multiply(M& m, const Slot& slot, uint32_t d, bool first) {
  const uint64_t a = tcgen05_descriptor(decltype(slot.a)::k_major(m.shared_address(&slot.a))),
                 b = tcgen05_descriptor(decltype(slot.b)::k_major(m.shared_address(&slot.b)));
  for (uint32_t k = 0; k < 128; k += 32)
    m.template tcgen05_mma<MmaKind::kF16>(d, advance(a, k), advance(b, k), instruction_descriptor_f16({128, 128}, true),
                                          !first || k > 0, 0, 0, m.elect_one());
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  auto& s = m.template shared<shared>();
  const auto one = m.elect_one();
  const auto tile = ladder::tile_position<C>(m.cta_idx(), g.columns);
  if (m.warp_idx() == 0)
    m.mbarrier_init(s.arrived, 1, one), m.mbarrier_init(s.multiplied, 1, one), m.fence_mbarrier_init();
  const uint32_t tmem = ladder::allocate(m, s.tmem, 128, 0);
  for (int step = 0; step < g.steps && m.warp_idx() == 0; ++step) {
    m.mbarrier_arrive_expect_tx(s.arrived, 2 * decltype(s.a)::num_bytes, one);
    m.tma_load(&s.a, g.a_map, step * 64, tile.row, s.arrived, one);
    m.tma_load(&s.b, g.b_map, step * 64, tile.column, s.arrived, one);
    m.mbarrier_wait(s.arrived, static_cast<uint32_t>(step % 2));
    multiply(m, s, tmem, step == 0);
    m.tcgen05_commit(s.multiplied, one);
    m.mbarrier_wait(s.multiplied, static_cast<uint32_t>(step % 2));  // before the boxes are overwritten
  }
  m.syncthreads();
  m.tcgen05_fence_after_thread_sync();
  ladder::drain(m, g, tile, tmem);
  ladder::release(m, tmem, 128, 0);
}

MXMOE_LAUNCHABLE("ladder 4", shared)

}  // namespace mxmoe::cuda::level4
