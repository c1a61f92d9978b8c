// grouped_mm_wgrad on sm_90a: out[e] (+)= sum over the tokens of group e of a (tokens, O)^T . b (tokens, C), BF16 or
// FP16.
//
// Both operands lie token by token, so wgmma reads them MN-major: a slot is 64 tokens x 128 features of each, as
// 128-byte lines. Two warpgroups of consumers, 64 rows each of a tile of 128 x 128, a producer warp, and a warp that
// clears in a group's last slot the lines of the next group.
//
//   slot arrived (TMA bytes)     producer  -> consumers, clearer
//   slot cleared (1 arrival)     clearer   -> consumers, in a slot with lines to clear
//   slot finished (9 arrivals)   consumers, clearer -> producer
#pragma once
#include "cuda/kernels/grouped_mm.h"
#include "cuda/kernels/schedule.h"
#include "cuda/launch.h"
#include "cuda/tile/types.h"

namespace mxmoe::cuda::grouped_mm_wgrad_sm90 {

template <bool kBF16Operands, Output kOutputType, bool kAccumulateOutput>
struct config {
  static constexpr bool kBF16 = kBF16Operands, kAccumulate = kAccumulateOutput;
  static constexpr Output kOutput = kOutputType;
  static constexpr int kRows = 128, kColumns = 128, kStages = 4, kConsumers = 8, kWarps = kConsumers + 2;
  static constexpr int kTokens = 64, kStepTokens = 16;  // of a slot, of an instruction
  static constexpr int kLineBytes = 128, kBlocks = 2, kBlockFeatures = 64;
};

template <class C>
struct shared {
  using block = st<C::kTokens, C::kLineBytes, Swizzle::k128B>;
  struct slot {
    block a[C::kBlocks], b[C::kBlocks];
  };
  slot slots[C::kStages];
  barrier arrived[C::kStages], cleared[C::kStages], finished[C::kStages];
};

template <class M>
struct globals {
  typename M::tensor_map a, b;     // (tokens, O), (tokens, C), boxes of a block
  void* out;                       // (experts, O, C)
  int64_t out_expert, out_stride;  // elements from one expert, from one row to the next
  Gradients gradients;
};

// Slots with lines to clear do not come in the ring's order: each slot has a parity of its own.
struct ClearedParity {
  uint32_t bits = 0;
  MXMOE_KERNEL uint32_t next(int slot) {
    bits ^= 1u << slot;
    return ~bits >> slot & 1;
  }
};

template <class M, class C>
MXMOE_KERNEL void produce(M& m, const globals<M>& g, shared<C>& s) {
  m.role("producer");
  const auto one = m.elect_one();
  ring<C::kStages> at;
  GradientTile tile;
  for (auto walk = GradientWalk::begin(m, g.gradients); walk.advance(m, tile);) {
    for (int step = 0; step * C::kTokens < tile.tokens; ++step, at.advance()) {
      auto& slot = s.slots[at.slot];
      auto& arrived = s.arrived[at.slot];
      const int token = static_cast<int>(tile.start) + step * C::kTokens;
      m.mbarrier_wait(s.finished[at.slot], at.parity ^ 1);
      m.mbarrier_arrive_expect_tx(arrived, 2 * C::kBlocks * shared<C>::block::num_bytes, one);
      for (int i = 0; i < C::kBlocks; ++i) {
        m.tma_load(&slot.a[i], g.a, tile.row_tile * C::kRows + i * C::kBlockFeatures, token, arrived, one);
        m.tma_load(&slot.b[i], g.b, tile.column_tile * C::kColumns + i * C::kBlockFeatures, token, arrived, one);
      }
    }
  }
}

template <class M, class C>
MXMOE_KERNEL void clear(M& m, const globals<M>& g, shared<C>& s) {
  m.role("clearer");
  const auto one = m.elect_one();
  ring<C::kStages> at;
  GradientTile tile;
  for (auto walk = GradientWalk::begin(m, g.gradients); walk.advance(m, tile);) {
    for (int step = 0; step * C::kTokens < tile.tokens; ++step, at.advance()) {
      const int tokens = tile.tokens - step * C::kTokens;
      auto& slot = s.slots[at.slot];
      m.mbarrier_wait(s.arrived[at.slot], at.parity);
      if (tokens < C::kTokens) {
        for (int i = 0; i < C::kBlocks; ++i)
          clear_lines(m, slot.a[i], tokens, C::kTokens), clear_lines(m, slot.b[i], tokens, C::kTokens);
        m.fence_proxy_async();
        m.syncwarp();
        m.mbarrier_arrive(s.cleared[at.slot], one);
      }
      m.mbarrier_arrive(s.finished[at.slot], one);  // of every slot, so that no lap is missed
    }
  }
}

template <class M, class C>
MXMOE_KERNEL void consume(M& m, const globals<M>& g, shared<C>& s) {
  using F = typename M::template lane<float>;
  using block = typename shared<C>::block;
  m.role("consumer");
  const auto one = m.elect_one();
  const int group = m.warp_idx() / 4;  // warpgroup: its 64 rows are a block of A
  const auto lane = m.lane_idx();
  const bool aligned = pairs_aligned<C::kOutput>(g.out, g.out_stride | g.out_expert, g.gradients.columns);
  ring<C::kStages> at;
  ClearedParity cleared;
  GradientTile tile;
  for (auto walk = GradientWalk::begin(m, g.gradients); walk.advance(m, tile);) {
    typename M::template registers<float, 64> d;
    unrolled<64>([&](int i) { d[i] = F{}; });
    for (int step = 0; step * C::kTokens < tile.tokens; ++step, at.advance()) {
      auto& slot = s.slots[at.slot];
      const uint64_t a = wgmma_descriptor(block::mn_major(m.shared_address(&slot.a[group])));
      const uint64_t b = wgmma_descriptor(block::mn_major(m.shared_address(&slot.b[0])));
      if (tile.tokens - step * C::kTokens >= C::kTokens)
        m.mbarrier_wait(s.arrived[at.slot], at.parity);
      else
        m.mbarrier_wait(s.cleared[at.slot], cleared.next(at.slot));
      m.wgmma_fence();
      for (int k = 0; k < C::kTokens / C::kStepTokens; ++k) {
        const auto bytes = static_cast<uint32_t>(k * C::kStepTokens * C::kLineBytes);
        m.template wgmma_m64n128k16<C::kBF16, true, true>(d, advance(a, bytes), advance(b, bytes), true);
      }
      m.wgmma_commit_group();
      m.wgmma_wait_group(d);
      m.mbarrier_arrive(s.finished[at.slot], one);
    }
    if (C::kAccumulate && tile.tokens == 0) continue;
    const int rows = g.gradients.rows - tile.row_tile * C::kRows;
    uint8_t* out = static_cast<uint8_t*>(g.out) +
                   (tile.expert * g.out_expert + tile.row_tile * C::kRows * g.out_stride) * bytes_of(C::kOutput);
    unrolled<32>([&](int pair) {  // two columns of one row
      const int i = 2 * pair;
      const auto row = wgmma_row(m.warp_idx() % 4, 0, i) + group * 64 + lane / 4;
      const auto column = wgmma_column(0, i) + tile.column_tile * C::kColumns + lane % 4 * 2;
      const auto offset = (row * static_cast<int>(g.out_stride) + column) * bytes_of(C::kOutput);
      F y[2] = {d[i], d[i + 1]};
      if constexpr (C::kAccumulate) add_pair<C::kOutput>(m, out, offset, y, column, g.gradients.columns, row < rows);
      store_pair<C::kOutput>(m, out, offset, y, column, g.gradients.columns, aligned, row < rows);
    });
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  auto& s = m.template shared<shared<C>>();
  const auto one = m.elect_one();
  if (m.warp_idx() == 0) {
    for (int i = 0; i < C::kStages; ++i)
      m.mbarrier_init(s.arrived[i], 1, one), m.mbarrier_init(s.cleared[i], 1, one),
          m.mbarrier_init(s.finished[i], C::kConsumers + 1, one);
    m.fence_mbarrier_init();
  }
  m.syncthreads();
  if (m.warp_idx() == C::kConsumers)
    produce<M, C>(m, g, s);
  else if (m.warp_idx() == C::kConsumers + 1)
    clear<M, C>(m, g, s);
  else
    consume<M, C>(m, g, s);
}

MXMOE_LAUNCHABLE("grouped_mm_wgrad", shared<C>)

// a (tokens, O), b (tokens, C), rows 16 bytes apart; offs (E,); out (E, O, C), rows of unit stride.
template <bool kBF16, class L>
void launch(L& l, const Tensor& a, const Tensor& b, const Tensor& offs, bool accumulate, const Tensor& out) {
  globals<typename L::machine> g{};
  g.out = out.data, g.out_expert = out.strides[0], g.out_stride = out.strides[1];
  g.gradients = gradients_of(offs, out, false);
  const auto run = [&]<Output kOutput, bool kAccumulate>() {
    using C = config<kBF16, kOutput, kAccumulate>;
    g.a = l.tensor_map(a, C::kTokens, C::kLineBytes, Swizzle::k128B);
    g.b = l.tensor_map(b, C::kTokens, C::kLineBytes, Swizzle::k128B);
    l.template run<launchable<C>>(
        l.num_sms(), g,
        {{"a", a}, {"b", b}, {"offs", offs}, {"out", out, kAccumulate ? Use::kUpdated : Use::kWritten}});
  };
  with_output(out.dtype, [&]<Output kOutput>() {
    if (accumulate)
      run.template operator()<kOutput, true>();
    else
      run.template operator()<kOutput, false>();
  });
}

}  // namespace mxmoe::cuda::grouped_mm_wgrad_sm90
