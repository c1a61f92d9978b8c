// grouped_mm_wgrad on sm_90a: out[e] (+)= sum over the tokens of group e of a (tokens, O)^T . b (tokens, C).
//
// Two warpgroups of consumers, 64 rows each of a tile of 128 x 128, and a producer warp. Operands of 8 and 16 bits lie
// token by token, so wgmma reads them MN-major: BF16 and FP16 as they come, and one more warp clears in a group's last
// slot the lines of the next group. Of MXFP8 and NVFP4 (feature by feature, K-major), whose groups are padded with
// zeros, two more warpgroups decode what comes to BF16, into a second ring.
//
//   codes arrived (TMA bytes)                producer -> decoders
//   codes finished (8 arrivals)              decoders -> producer
//   halves arrived (TMA bytes | 8 arrivals)  producer | decoders -> consumers, clearer
//   cleared (1 arrival)                      clearer -> consumers, in a slot with lines to clear
//   halves finished (9 | 8 arrivals)         consumers, clearer -> producer | decoders
#pragma once
#include "cuda/kernels/grouped_mm.h"
#include "cuda/kernels/grouped_mm_wgrad_operands.h"
#include "cuda/kernels/tensor_core_sm90.h"
#include "cuda/kernels/to_bf16.h"

namespace mxmoe::cuda::grouped_mm_wgrad_sm90 {

using grouped_mm_wgrad::globals, grouped_mm_wgrad::OperandTensors;

template <Operand kOperandFormat, bool kBF16Operands, Output kOutputType, bool kAccumulateOutput>
struct config {
  static constexpr Operand kOperand = kOperandFormat;
  static constexpr bool kBF16 = kBF16Operands, kAccumulate = kAccumulateOutput, kDecoded = kOperand != Operand::kHalf;
  static constexpr Output kOutput = kOutputType;
  using Layout = gradient_layout<kOperand, kDecoded ? 2 : 4>;            // what is brought
  using Halves = gradient_layout<Operand::kHalf, 4, Layout::kAColumns>;  // what is multiplied
  static constexpr int kRows = Halves::kRows, kColumns = Halves::kColumns;
  static constexpr int kConsumers = 8, kProducer = kConsumers, kClearers = kDecoded ? 0 : 1,
                       kDecoders = kDecoded ? 8 : 0, kWarps = kConsumers + 1 + kClearers + kDecoders;
};

template <class C, bool kDecoded = C::kDecoded>
struct shared {
  operand_ring<typename C::Halves> halves;
  barrier cleared[C::Halves::kStages];
  MXMOE_KERNEL auto& brought() { return halves; }
};
template <class C>
struct shared<C, true> {
  operand_ring<typename C::Halves> halves;
  operand_ring<typename C::Layout> codes;
  MXMOE_KERNEL auto& brought() { return codes; }
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
MXMOE_KERNEL void clear(M& m, const globals<M>& g, shared<C>& s) {
  m.role("clearer");
  const auto one = m.elect_one();
  constexpr int kTokens = C::Halves::kTokens;
  ring<C::Halves::kStages> at;
  GradientTile tile;
  for (auto walk = GradientWalk::begin(m, g.gradients); walk.advance(m, tile);) {
    for (int step = 0; step * kTokens < tile.tokens; ++step, at.advance()) {
      const int tokens = tile.tokens - step * kTokens;
      auto& slot = s.halves.slots[at.slot];
      m.mbarrier_wait(s.halves.arrived[at.slot], at.parity);
      if (tokens < kTokens) {
        for (int i = 0; i < C::Halves::kBlocks; ++i)
          clear_lines(m, slot.a[i], tokens, kTokens), clear_lines(m, slot.b[i], tokens, kTokens);
        m.fence_proxy_async();
        m.syncwarp();
        m.mbarrier_arrive(s.cleared[at.slot], one);
      }
      m.mbarrier_arrive(s.halves.finished[at.slot], one);  // of every slot, so that no lap is missed
    }
  }
}

template <class M, class C>
MXMOE_KERNEL void decode(M& m, const globals<M>& g, shared<C>& s) {
  m.role("decoder");
  const bool is_b = m.warp_idx() - C::kProducer > 4;
  const ElementBits element = element_bits_of<C::kOperand>(is_b ? g.b_element : g.a_element);
  Decoding<C> at;
  GradientTile tile;
  for (auto walk = GradientWalk::begin(m, g.gradients); walk.advance(m, tile);)
    decode_tile<C>(m, s.codes, s.halves, at, element, is_b, tile.tokens);
}

template <class M, class C>
MXMOE_KERNEL void multiply(M& m, shared<C>& s, ring<C::Halves::kStages>& at, ClearedParity& cleared, int warpgroup,
                           int tokens, typename M::template registers<float, 64>& d) {
  using Halves = typename C::Halves;
  const auto one = m.elect_one();
  tensor_core::SlotInFlight in_flight;
  for (int left = tokens; left > 0; left -= Halves::kTokens, at.advance()) {
    if (C::kDecoded || left >= Halves::kTokens)
      m.mbarrier_wait(s.halves.arrived[at.slot], at.parity);
    else if constexpr (!C::kDecoded)
      m.mbarrier_wait(s.cleared[at.slot], cleared.next(at.slot));
    tensor_core::multiply_slot<Halves, C::kBF16>(m, s.halves.slots[at.slot], warpgroup, d);
    in_flight.next(m, at.slot, s.halves.finished, d, one);
  }
  in_flight.last(m, s.halves.finished, d, one);
}

template <class M, class C>
MXMOE_KERNEL void consume(M& m, const globals<M>& g, shared<C>& s) {
  using F = typename M::template lane<float>;
  m.role("consumer");
  const int warpgroup = m.warp_idx() / 4;
  const auto lane = m.lane_idx();
  const bool aligned = pairs_aligned<C::kOutput>(g.out, g.out_stride | g.out_expert, g.gradients.columns);
  ring<C::Halves::kStages> at;
  ClearedParity cleared;
  GradientTile tile;
  for (auto walk = GradientWalk::begin(m, g.gradients); walk.advance(m, tile);) {
    typename M::template registers<float, 64> d;
    unrolled<64>([&](int i) { d[i] = F{}; });
    multiply<M, C>(m, s, at, cleared, warpgroup, tile.tokens, d);
    if (C::kAccumulate && tile.tokens == 0) continue;
    const int rows = g.gradients.rows - tile.row_tile * C::kRows;
    uint8_t* out = static_cast<uint8_t*>(g.out) +
                   (tile.expert * g.out_expert + tile.row_tile * C::kRows * g.out_stride) * bytes_of(C::kOutput);
    float a_global = 0, b_global = 0;
    if constexpr (C::kOperand == Operand::kNvfp4)
      a_global = m.ld_global_uniform(g.a_global + tile.expert),
      b_global = m.ld_global_uniform(g.b_global + tile.expert);
    unrolled<32>([&](int pair) {  // two columns of one row
      const int i = 2 * pair;
      const auto row = wgmma_row(m.warp_idx() % 4, 0, i) + warpgroup * 64 + lane / 4;
      const auto column = wgmma_column(0, i) + tile.column_tile * C::kColumns + lane % 4 * 2;
      const auto offset = (row * static_cast<int>(g.out_stride) + column) * bytes_of(C::kOutput);
      F y[2] = {d[i], d[i + 1]};
      if constexpr (C::kOperand == Operand::kNvfp4)
        for (int j = 0; j < 2; ++j) y[j] = y[j] * a_global * b_global;
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
    for (int i = 0; i < C::Halves::kStages; ++i) {
      m.mbarrier_init(s.halves.arrived[i], C::kDecoded ? C::kDecoders : 1, one);
      m.mbarrier_init(s.halves.finished[i], C::kConsumers + C::kClearers, one);
      if constexpr (!C::kDecoded) m.mbarrier_init(s.cleared[i], 1, one);
    }
    if constexpr (C::kDecoded)
      for (int i = 0; i < C::Layout::kStages; ++i)
        m.mbarrier_init(s.codes.arrived[i], 1, one), m.mbarrier_init(s.codes.finished[i], C::kDecoders, one);
    m.fence_mbarrier_init();
  }
  m.syncthreads();
  if (m.warp_idx() < C::kConsumers)
    consume<M, C>(m, g, s);
  else if (m.warp_idx() == C::kProducer)
    grouped_mm_wgrad::produce<typename C::Layout>(m, g, s.brought());
  else if constexpr (C::kDecoded)
    decode<M, C>(m, g, s);
  else
    clear<M, C>(m, g, s);
}

MXMOE_LAUNCHABLE("grouped_mm_wgrad", shared<C>)

// BF16 and FP16: kBF16 says which.
template <Operand kOperand, bool kBF16, class L>
void launch(L& l, const OperandTensors& a, const OperandTensors& b, const Tensor& offs, bool accumulate,
            const Tensor& out) {
  with_output(out.dtype, [&]<Output kOutput>() {
    const auto run = [&]<bool kAccumulate>() {
      using C = config<kOperand, kBF16, kOutput, kAccumulate>;
      grouped_mm_wgrad::launch<launchable<C>, typename C::Layout>(l, a, b, offs,
                                                                  kAccumulate ? Use::kUpdated : Use::kWritten, out);
    };
    if (accumulate)
      run.template operator()<true>();
    else
      run.template operator()<false>();
  });
}

}  // namespace mxmoe::cuda::grouped_mm_wgrad_sm90
