// What the grouped GEMMs of sm_90a share: a slot multiplied by a warpgroup, which has 64 rows of a tile in registers,
// while the slot before it is still being multiplied.
#pragma once
#include "cuda/kernels/operand_ring.h"
#include "cuda/tile/types.h"

namespace mxmoe::cuda::tensor_core {

// Issues the products of `slot`, in which `warpgroup` has half of A's rows.
template <class Layout, bool kBF16, class M>
MXMOE_KERNEL void multiply_slot(M& m, operand_slot<Layout>& slot, int warpgroup,
                                typename M::template registers<float, 64>& d) {
  using L = Layout;
  static_assert(L::kHalf && L::kRows == 128 && L::kColumns == 128, "two warpgroups of wgmma.m64n128k16");
  const uint32_t a_address = m.shared_address(&slot.a[0]) + static_cast<uint32_t>(warpgroup * 64 * L::kStepBytes),
                 b_address = m.shared_address(&slot.b[0]);
  const uint64_t a = wgmma_descriptor(L::kAColumns ? L::a_tile::mn_major(a_address) : L::a_tile::k_major(a_address)),
                 b = wgmma_descriptor(L::kBColumns ? L::b_tile::mn_major(b_address) : L::b_tile::k_major(b_address));
  constexpr uint32_t kAcross = L::kInstruction * L::kStepBytes, kAlong = L::kStepBytes / 4;  // bytes of a step
  m.wgmma_fence();
  for (uint32_t k = 0; k < 4; ++k)
    m.template wgmma_m64n128k16<kBF16, L::kAColumns, L::kBColumns>(
        d, advance(a, k * (L::kAColumns ? kAcross : kAlong)), advance(b, k * (L::kBColumns ? kAcross : kAlong)), true);
  m.wgmma_commit_group();
}

// The slot that is being multiplied: given back when the next one is issued, or at the end of a tile.
struct SlotInFlight {
  int slot = -1;

  template <class M>
  MXMOE_KERNEL void next(M& m, int issued, barrier* finished, typename M::template registers<float, 64>& d,
                         typename M::pred one) {
    m.template wgmma_wait_group<1>(d);
    if (slot >= 0) m.mbarrier_arrive(finished[slot], one);
    slot = issued;
  }
  template <class M>
  MXMOE_KERNEL void last(M& m, barrier* finished, typename M::template registers<float, 64>& d, typename M::pred one) {
    m.template wgmma_wait_group<0>(d);
    if (slot >= 0) m.mbarrier_arrive(finished[slot], one);
  }
};

}  // namespace mxmoe::cuda::tensor_core
