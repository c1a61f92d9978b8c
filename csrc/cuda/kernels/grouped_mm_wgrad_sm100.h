// grouped_mm_wgrad on sm_100a: out[e] (+)= sum over the tokens of group e of a (tokens, O)^T . b (tokens, C).
//
// Both operands lie token by token, so the tensor core reads them MN-major: a slot is some tokens x 128 features of
// each, as 128-byte lines. Roles, ring and accumulators are grouped_mm_sm100.h's. MXFP8 groups are padded to 128 tokens
// with zeros; BF16 and FP16 ones are not: the issuer clears the lines of the next group in the last slot.
//
//   slot arrived (TMA bytes)      producer -> issuer
//   slot finished (commit; BF16: and an arrival)  issuer -> producer
//   output arrived (commit)       issuer   -> epilogue
//   output finished (4 arrivals)  epilogue -> issuer
#pragma once
#include "cuda/kernels/grouped_mm.h"
#include "cuda/kernels/schedule.h"
#include "cuda/launch.h"
#include "cuda/tile/types.h"
#include "formats.h"
#include "layout.h"

namespace mxmoe::cuda::grouped_mm_wgrad_sm100 {

template <bool kMxfp8Operands, Output kOutputType, bool kAccumulateOutput>
struct config {
  static constexpr bool kMxfp8 = kMxfp8Operands, kAccumulate = kAccumulateOutput;
  static constexpr Output kOutput = kOutputType;
  static constexpr MmaKind kKind = kMxfp8 ? MmaKind::kMxf8f6f4 : MmaKind::kF16;
  static constexpr int kRows = 128, kColumns = 128, kStages = 4, kWarps = 6, kEpilogueWarps = 4;
  static constexpr int kLineBytes = 128;
  static constexpr int kTokens = kMxfp8 ? 128 : 64;     // of a slot
  static constexpr int kStepTokens = kMxfp8 ? 32 : 16;  // of an instruction
  static constexpr int kBlocks = kMxfp8 ? 1 : 2;        // lines side by side that 128 features need
  static constexpr int kBlockFeatures = kRows / kBlocks;
  static constexpr int kReleases = kMxfp8 ? 1 : 2;  // of a slot: the tensor core's, and the issuer's own writes to it
  // Tensor memory: two accumulators, then the scale words of a slot.
  static constexpr uint32_t kScalesA = 2 * kColumns, kScalesB = kScalesA + 4, kTmemColumns = 512;
};

template <class C>
struct shared {
  using block = st<C::kTokens, C::kLineBytes, Swizzle::k128B>;
  struct slot {
    block a[C::kBlocks], b[C::kBlocks];
    scale_tile a_scales, b_scales;
  };
  slot slots[C::kStages];
  barrier arrived[C::kStages], finished[C::kStages], output_arrived[2], output_finished[2];
  uint32_t tmem;
};

template <class M>
struct globals {
  typename M::tensor_map a, b;         // (tokens, O), (tokens, C), boxes of a block
  const uint8_t *a_scales, *b_scales;  // one blocked matrix per group, of its padded tokens
  void* out;                           // (experts, O, C)
  int64_t out_expert, out_stride;      // elements from one expert, from one row to the next
  Gradients gradients;
  int a_element, b_element;  // MX: 0 E4M3, 1 E5M2; half: 0 FP16, 1 BF16
};

// Scales of the slot-th 128 tokens of a group, for a tile of 128 of `features` lines.
MXMOE_FACT int64_t scale_offset(const GradientTile& t, int features, int feature_tile, int slot) {
  const int64_t slots = ceil_div(t.tokens, kGroupAlignment);
  return round_up(features, kScaleTileRows) * t.start / 32 + (feature_tile * slots + slot) * kScaleTileBytes;
}

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
      m.mbarrier_arrive_expect_tx(
          arrived, 2 * C::kBlocks * shared<C>::block::num_bytes + (C::kMxfp8 ? 2 * kScaleTileBytes : 0), one);
      for (int i = 0; i < C::kBlocks; ++i) {
        m.tma_load(&slot.a[i], g.a, tile.row_tile * C::kRows + i * C::kBlockFeatures, token, arrived, one);
        m.tma_load(&slot.b[i], g.b, tile.column_tile * C::kColumns + i * C::kBlockFeatures, token, arrived, one);
      }
      if constexpr (C::kMxfp8) {
        m.bulk_load(&slot.a_scales, g.a_scales + scale_offset(tile, g.gradients.rows, tile.row_tile, step),
                    kScaleTileBytes, arrived, one);
        m.bulk_load(&slot.b_scales, g.b_scales + scale_offset(tile, g.gradients.columns, tile.column_tile, step),
                    kScaleTileBytes, arrived, one);
      }
    }
  }
}

// One slot: its scales to tensor memory, then its tokens.
template <class M, class C>
MXMOE_KERNEL void multiply_slot(M& m, const globals<M>& g, typename shared<C>::slot& slot, uint32_t tmem, uint32_t d,
                                int tokens, bool first, typename M::pred one) {
  const MmaShape shape{C::kRows, C::kColumns, true, true};
  if constexpr (C::kMxfp8) {
    m.tcgen05_cp_32x128b_warpx4(tmem + C::kScalesA,
                                tcgen05_descriptor(scale_tile::as_operand(m.shared_address(&slot.a_scales))), one);
    m.tcgen05_cp_32x128b_warpx4(tmem + C::kScalesB,
                                tcgen05_descriptor(scale_tile::as_operand(m.shared_address(&slot.b_scales))), one);
  }
  using block = typename shared<C>::block;
  const uint64_t a = tcgen05_descriptor(block::mn_major(m.shared_address(&slot.a[0])));
  const uint64_t b = tcgen05_descriptor(block::mn_major(m.shared_address(&slot.b[0])));
  for (int k = 0; k * C::kStepTokens < tokens; ++k) {
    const uint32_t bytes = static_cast<uint32_t>(k * C::kStepTokens * C::kLineBytes);
    uint32_t instruction;
    if constexpr (C::kMxfp8)
      instruction = instruction_descriptor_mxf8f6f4(shape, static_cast<uint32_t>(g.a_element),
                                                    static_cast<uint32_t>(g.b_element), static_cast<uint32_t>(k));
    else
      instruction = instruction_descriptor_f16(shape, g.a_element != 0);
    m.template tcgen05_mma<C::kKind>(d, advance(a, bytes), advance(b, bytes), instruction, !first || k > 0,
                                     tmem + C::kScalesA, tmem + C::kScalesB, one);
  }
}

template <class M, class C>
MXMOE_KERNEL void issue(M& m, const globals<M>& g, shared<C>& s, uint32_t tmem) {
  m.role("issuer");
  const auto one = m.elect_one();
  ring<C::kStages> at;
  ring<2> output;
  GradientTile tile;
  for (auto walk = GradientWalk::begin(m, g.gradients); walk.advance(m, tile);) {
    if (tile.tokens == 0) continue;
    m.mbarrier_wait(s.output_finished[output.slot], output.parity ^ 1);
    m.tcgen05_fence_after_thread_sync();
    const uint32_t d = tmem + static_cast<uint32_t>(output.slot * C::kColumns);
    for (int step = 0; step * C::kTokens < tile.tokens; ++step, at.advance()) {
      m.mbarrier_wait(s.arrived[at.slot], at.parity);
      const int left = tile.tokens - step * C::kTokens, tokens = left < C::kTokens ? left : C::kTokens;
      if (!C::kMxfp8 && tokens % C::kStepTokens) {
        auto& slot = s.slots[at.slot];
        const int end = static_cast<int>(round_up(tokens, C::kStepTokens));
        for (int i = 0; i < C::kBlocks; ++i)
          clear_lines(m, slot.a[i], tokens, end), clear_lines(m, slot.b[i], tokens, end);
        m.fence_proxy_async();
        m.syncwarp();
      }
      multiply_slot<M, C>(m, g, s.slots[at.slot], tmem, d, tokens, step == 0, one);
      m.tcgen05_commit(s.finished[at.slot], one);
      if constexpr (C::kReleases == 2) m.mbarrier_arrive(s.finished[at.slot], one);
    }
    m.tcgen05_commit(s.output_arrived[output.slot], one);
    output.advance();
  }
}

template <class M, class C>
MXMOE_KERNEL void drain(M& m, const globals<M>& g, shared<C>& s, uint32_t tmem) {
  using F = typename M::template lane<float>;
  m.role("epilogue");
  const auto one = m.elect_one();
  const int quarter = m.warp_idx() % 4 * 32;  // the lanes of tensor memory that this warp may read
  const auto row = m.lane_idx() + quarter;
  const bool aligned = output_aligned<C::kOutput>(g.out, g.out_stride, g.gradients.columns) &&
                       output_aligned<C::kOutput>(g.out, g.out_expert, g.gradients.columns);
  ring<2> output;
  GradientTile tile;
  for (auto walk = GradientWalk::begin(m, g.gradients); walk.advance(m, tile);) {
    const bool product = tile.tokens > 0;
    if (!product && C::kAccumulate) continue;
    const int64_t first_row = int64_t{tile.row_tile} * C::kRows;
    const auto writes = row < static_cast<int>(g.gradients.rows - first_row);
    if (product) {
      m.mbarrier_wait(s.output_arrived[output.slot], output.parity);
      m.tcgen05_fence_after_thread_sync();
    }
    for (int column = 0; column < C::kColumns; column += 16) {
      F y[16] = {};
      if (product) {
        typename M::template registers<uint32_t, 16> d;
        m.tcgen05_ld(d, tmem + tmem_address(static_cast<uint32_t>(quarter),
                                            static_cast<uint32_t>(output.slot * C::kColumns + column)));
        m.tcgen05_wait_ld(d);
        for (int j = 0; j < 16; ++j) y[j] = __builtin_bit_cast(F, d[j]);
      }
      const int first = tile.column_tile * C::kColumns + column;
      if (first >= g.gradients.columns) continue;
      uint8_t* out = static_cast<uint8_t*>(g.out) +
                     (tile.expert * g.out_expert + first_row * g.out_stride + first) * bytes_of(C::kOutput);
      const auto offset = row * static_cast<int>(g.out_stride * bytes_of(C::kOutput));
      if constexpr (C::kAccumulate)
        add_columns<C::kOutput>(m, out, offset, y, g.gradients.columns - first, aligned, writes);
      store_columns<C::kOutput>(m, out, offset, y, g.gradients.columns - first, aligned, writes);
    }
    if (product) {
      m.tcgen05_fence_before_thread_sync();
      m.mbarrier_arrive(s.output_finished[output.slot], one);
      output.advance();
    }
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  auto& s = m.template shared<shared<C>>();
  const auto one = m.elect_one();
  if (m.warp_idx() == 0) {
    for (int i = 0; i < C::kStages; ++i)
      m.mbarrier_init(s.arrived[i], 1, one), m.mbarrier_init(s.finished[i], C::kReleases, one);
    for (int i = 0; i < 2; ++i)
      m.mbarrier_init(s.output_arrived[i], 1, one), m.mbarrier_init(s.output_finished[i], C::kEpilogueWarps, one);
    m.fence_mbarrier_init();
  }
  if (m.warp_idx() == 1) m.tcgen05_alloc(m.shared_address(&s.tmem), C::kTmemColumns);
  m.tcgen05_fence_before_thread_sync();
  m.syncthreads();  // the other half of the fence comes before each role's first tcgen05 instruction
  const uint32_t tmem = m.ld_shared_uniform(m.shared_address(&s.tmem));

  if (m.warp_idx() == 0)
    produce<M, C>(m, g, s);
  else if (m.warp_idx() == 1)
    issue<M, C>(m, g, s, tmem);
  else
    drain<M, C>(m, g, s, tmem);

  m.syncthreads();
  m.tcgen05_fence_after_thread_sync();
  if (m.warp_idx() == 1) m.tcgen05_dealloc(tmem, C::kTmemColumns);
}

MXMOE_LAUNCHABLE("grouped_mm_wgrad", shared<C>)

// values (tokens, features), rows 16 bytes apart, groups padded to 128 tokens with MXFP8; scales: the groups' blocked
// matrices one after the other. element: 1 for E5M2 and BF16, 0 for E4M3 and FP16.
struct OperandTensors {
  Tensor values, scales;
  int element;
};

// offs (E,); out (E, O, C) FP32, BF16 or FP16, rows of unit stride.
template <bool kMxfp8, class L>
void launch(L& l, const OperandTensors& a, const OperandTensors& b, const Tensor& offs, bool accumulate,
            const Tensor& out) {
  globals<typename L::machine> g{};
  g.a_scales = a.scales.ptr<uint8_t>(), g.b_scales = b.scales.ptr<uint8_t>();
  g.out = out.data, g.out_expert = out.strides[0], g.out_stride = out.strides[1];
  g.gradients = gradients_of(offs, out, kMxfp8);
  g.a_element = a.element, g.b_element = b.element;
  const auto run = [&]<Output kOutput, bool kAccumulate>() {
    using C = config<kMxfp8, kOutput, kAccumulate>;
    g.a = l.tensor_map(a.values, C::kTokens, C::kLineBytes, Swizzle::k128B);
    g.b = l.tensor_map(b.values, C::kTokens, C::kLineBytes, Swizzle::k128B);
    l.template run<launchable<C>>(l.num_sms(), g,
                                  {{"a", a.values},
                                   {"a scales", a.scales},
                                   {"b", b.values},
                                   {"b scales", b.scales},
                                   {"offs", offs},
                                   {"out", out, kAccumulate ? Use::kUpdated : Use::kWritten}});
  };
  with_output(out.dtype, [&]<Output kOutput>() {
    if (accumulate)
      run.template operator()<kOutput, true>();
    else
      run.template operator()<kOutput, false>();
  });
}

}  // namespace mxmoe::cuda::grouped_mm_wgrad_sm100
