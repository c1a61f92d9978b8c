// Level 7: block scales, in the pipeline of level 6. The scales of a slot, 512 bytes of each operand in the blocked
// layout, come by bulk copies on the slot's barrier and go on to tensor memory, where the block-scaled tensor core
// reads them: copies and products of one thread run in order, no barrier stands between. grouped_mm_sm100.h adds
// groups, tails, formats and rounding.
#pragma once
#include "cuda/ladder/level6.h"

namespace mxmoe::cuda::level7 {
using ladder::globals;

struct mxfp8_slots {
  static constexpr int kStages = 4;
  static constexpr uint32_t kScalesA = 256, kScalesB = 272;  // columns of tensor memory, past two accumulators
  struct slot {
    st<128, 128, Swizzle::k128B> a, b;
    scale_tile a_scales, b_scales;
  } slots[kStages];
  barrier arrived[kStages], finished[kStages];

  template <class M>
  static MXMOE_KERNEL void produce(M& m, const globals<M>& g, mxfp8_slots& s, ladder::Position tile,
                                   ring<kStages>& at) {
    const auto one = m.elect_one();
    for (int step = 0; step < g.steps; ++step, at.advance()) {
      auto& to = s.slots[at.slot];
      auto& arrived = s.arrived[at.slot];
      m.mbarrier_wait(s.finished[at.slot], at.parity ^ 1);
      m.mbarrier_arrive_expect_tx(arrived, 2 * (decltype(to.a)::num_bytes + scale_tile::num_bytes), one);
      m.tma_load(&to.a, g.a_map, step * 128, tile.row, arrived, one);
      m.tma_load(&to.b, g.b_map, step * 128, tile.column, arrived, one);
      m.bulk_load(&to.a_scales, g.a_scales + (tile.row / 128 * g.steps + step) * 512, 512, arrived, one);
      m.bulk_load(&to.b_scales, g.b_scales + (tile.column / 128 * g.steps + step) * 512, 512, arrived, one);
    }
  }
  template <class M>
  static MXMOE_KERNEL void issue(M& m, const globals<M>& g, mxfp8_slots& s, uint32_t tmem, uint32_t d,
                                 ring<kStages>& at) {
    const auto one = m.elect_one();
    const auto scales = [&](auto& t) { return tcgen05_descriptor(scale_tile::as_operand(m.shared_address(&t))); };
    for (int step = 0; step < g.steps; ++step, at.advance()) {
      auto& from = s.slots[at.slot];
      const uint64_t a = tcgen05_descriptor(decltype(from.a)::k_major(m.shared_address(&from.a))),
                     b = tcgen05_descriptor(decltype(from.b)::k_major(m.shared_address(&from.b)));
      m.mbarrier_wait(s.arrived[at.slot], at.parity);
      m.tcgen05_cp_32x128b_warpx4(tmem + kScalesA, scales(from.a_scales), one);
      m.tcgen05_cp_32x128b_warpx4(tmem + kScalesB, scales(from.b_scales), one);
      for (uint32_t k = 0; k < 4; ++k)  // 32 elements each: one byte of every scale word
        m.template tcgen05_mma<MmaKind::kMxf8f6f4>(d, advance(a, 32 * k), advance(b, 32 * k),
                                                   instruction_descriptor_mxf8f6f4({128, 128}, 0, 0, k),
                                                   step > 0 || k > 0, tmem + kScalesA, tmem + kScalesB, one);
      m.tcgen05_commit(s.finished[at.slot], one);
    }
  }
};
struct config : level6::config {
  using slots = mxfp8_slots;
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  level6::kernel<C>(m, g);
}

MXMOE_LAUNCHABLE("ladder 7", level6::shared<C>)

}  // namespace mxmoe::cuda::level7
