// What the grouped GEMMs of sm_100a share: the frame of a kernel, a slot multiplied by the tensor core, its result.
//
// Six warps: a producer, an issuer, and four of the epilogue, which drain one of the two accumulators in tensor memory
// while the other fills.
//
//   slot arrived (TMA bytes)      producer -> issuer
//   slot finished (commit)        issuer   -> producer
//   output arrived (commit)       issuer   -> epilogue
//   output finished (4 arrivals)  epilogue -> issuer
//
// Two CTAs of a pair (Layout::kCtas) are one tensor core: the first one's issuer multiplies for both, waits for the
// bytes and the epilogues of both, and commits to the barriers of both.
#pragma once
#include "cuda/kernels/operand_ring.h"
#include "cuda/tile/types.h"

namespace mxmoe::cuda::tensor_core {

constexpr int kWarps = 6, kEpilogueWarps = 4;
// Tensor memory: two accumulators, then the scale words of a slot.
constexpr uint32_t kAccumulator = 128, kScalesA = 2 * kAccumulator, kScalesB = kScalesA + 16, kColumns = 512;
static_assert(kScalesB + 16 <= kColumns, "accumulators and scales must fit in tensor memory");

template <class Layout>
struct shared : operand_ring<Layout> {
  barrier output_arrived[2], output_finished[2];
  uint32_t tmem;
};

// Its scales to tensor memory, then up to four steps of the contraction, of which so many elements are left.
template <class Layout, class M>
MXMOE_KERNEL void multiply_slot(M& m, operand_slot<Layout>& slot, uint32_t tmem, uint32_t d, int left, int a_element,
                                int b_element, bool first, typename M::pred one) {
  using L = Layout;
  const MmaShape shape{L::kCtas * L::kRows, L::kColumns, L::kAColumns, L::kBColumns};
  if constexpr (L::kScaleTiles > 0)
    unrolled<L::kScaleTiles>([&](int i) {
      if (L::kScaleTiles > 1 && i * L::kTileElements >= left) return;
      const uint32_t column = tmem + static_cast<uint32_t>(4 * i);
      m.template tcgen05_cp_32x128b_warpx4<L::kCtas>(
          column + kScalesA, tcgen05_descriptor(scale_tile::as_operand(m.shared_address(&slot.a_scales[i]))), one);
      m.template tcgen05_cp_32x128b_warpx4<L::kCtas>(
          column + kScalesB, tcgen05_descriptor(scale_tile::as_operand(m.shared_address(&slot.b_scales[i]))), one);
    });
  const uint32_t a_address = m.shared_address(&slot.a[0]), b_address = m.shared_address(&slot.b[0]);
  const uint64_t a = tcgen05_descriptor(L::kAColumns ? L::a_tile::mn_major(a_address) : L::a_tile::k_major(a_address)),
                 b = tcgen05_descriptor(L::kBColumns ? L::b_tile::mn_major(b_address) : L::b_tile::k_major(b_address));
  constexpr uint32_t kAcross = L::kInstruction * L::kStepBytes, kAlong = L::kStepBytes / 4;  // bytes of a step
  unrolled<4>([&](int step) {
    if (step * L::kInstruction >= left) return;
    const auto k = static_cast<uint32_t>(step);
    uint32_t instruction, scales = 0;
    constexpr MmaKind kKind = L::kHalf ? MmaKind::kF16 : L::kFp4 ? MmaKind::kMxf4nvf4 : MmaKind::kMxf8f6f4;
    if constexpr (L::kHalf)
      instruction = instruction_descriptor_f16(shape, a_element != 0);
    else if constexpr (L::kFp4)
      instruction = instruction_descriptor_mxf4nvf4(shape), scales = 4 * k;
    else
      instruction =
          instruction_descriptor_mxf8f6f4(shape, static_cast<uint32_t>(a_element), static_cast<uint32_t>(b_element), k);
    m.template tcgen05_mma<kKind, L::kCtas>(d, advance(a, k * (L::kAColumns ? kAcross : kAlong)),
                                            advance(b, k * (L::kBColumns ? kAcross : kAlong)), instruction,
                                            !first || k > 0, tmem + kScalesA + scales, tmem + kScalesB + scales, one);
  });
}

// What the tensor core was given so far is done: arrives at the barrier, of both CTAs of a pair.
template <int kCtas, class M>
MXMOE_KERNEL void commit(M& m, barrier& b, typename M::pred one) {
  if constexpr (kCtas == 2)
    m.tcgen05_commit_pair(b, one);
  else
    m.tcgen05_commit(b, one);
}

// The epilogues, of both CTAs of a pair, have drained the accumulator.
template <int kCtas, class M>
MXMOE_KERNEL void wait_drained(M& m, barrier& finished, uint32_t parity) {
  if constexpr (kCtas == 2)
    m.mbarrier_wait_cluster(finished, parity);
  else
    m.mbarrier_wait(finished, parity);
  m.tcgen05_fence_after_thread_sync();
}
template <int kCtas, class M>
MXMOE_KERNEL void arrive_drained(M& m, barrier& finished, typename M::pred one) {
  m.tcgen05_fence_before_thread_sync();
  if constexpr (kCtas == 2)
    m.mbarrier_arrive_cluster(m.mapa(m.shared_address(&finished), 0), one);
  else
    m.mbarrier_arrive(finished, one);
}

// Of the CTA, or of both of a pair.
template <int kCtas, class M>
MXMOE_KERNEL void sync(M& m) {
  if constexpr (kCtas == 2)
    m.barrier_cluster_arrive(), m.barrier_cluster_wait();
  else
    m.syncthreads();
}

// The next 16 columns of this warp's 32 lanes of an accumulator.
template <class M, class F>
MXMOE_KERNEL void load_columns(M& m, uint32_t tmem, int output, int column, F (&y)[16]) {
  typename M::template registers<uint32_t, 16> d;
  m.tcgen05_ld(d, tmem + tmem_address(static_cast<uint32_t>(m.warp_idx() % 4 * 32),  // the lanes that it may read
                                      static_cast<uint32_t>(output) * kAccumulator + static_cast<uint32_t>(column)));
  m.tcgen05_wait_ld(d);
  for (int j = 0; j < 16; ++j) y[j] = __builtin_bit_cast(F, d[j]);
}

// produce(), issue(tmem) and drain(tmem) by their warps. releases: arrivals that finish a slot.
template <class Layout, class M, class Produce, class Issue, class Drain>
MXMOE_KERNEL void run(M& m, shared<Layout>& s, int releases, Produce produce, Issue issue, Drain drain) {
  const auto one = m.elect_one();
  if (m.warp_idx() == 0) {
    for (int i = 0; i < Layout::kStages; ++i)
      m.mbarrier_init(s.arrived[i], 1, one), m.mbarrier_init(s.finished[i], releases, one);
    for (int i = 0; i < 2; ++i)
      m.mbarrier_init(s.output_arrived[i], 1, one),
          m.mbarrier_init(s.output_finished[i], Layout::kCtas * kEpilogueWarps, one);
    m.fence_mbarrier_init();
  }
  if (m.warp_idx() == 1) m.template tcgen05_alloc<Layout::kCtas>(m.shared_address(&s.tmem), kColumns);
  m.tcgen05_fence_before_thread_sync();
  sync<Layout::kCtas>(m);  // the other half of the fence comes before each role's first tcgen05 instruction
  const uint32_t tmem = m.ld_shared_uniform(m.shared_address(&s.tmem));

  if (m.warp_idx() == 0)
    produce();
  else if (m.warp_idx() > 1)
    drain(tmem);
  else if (Layout::kCtas == 1 || m.cluster_ctarank() == 0)
    issue(tmem);

  sync<Layout::kCtas>(m);
  m.tcgen05_fence_after_thread_sync();
  if (m.warp_idx() == 1) m.template tcgen05_dealloc<Layout::kCtas>(tmem, kColumns);
}

}  // namespace mxmoe::cuda::tensor_core
