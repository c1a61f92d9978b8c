// grouped_mm on sm_90a: out[r] = a[r] . b[e]^T for the rows of every group e, by wgmma with accumulators in registers.
//
// One persistent CTA per SM: two warpgroups of consumers, 64 rows each of a tile of 128 x 128, and a producer warp that
// fills a ring of slots by TMA. BF16 and FP16 slots are multiplied as they come. Of MXFP8 and NVFP4 they hold codes and
// block scales, which two more warpgroups decode to BF16 into a second ring. B's lines run along the contraction, or
// (column copies of weights, for dgrad) along the outputs: then it is read MN-major.
//
//   codes arrived (TMA bytes)                producer -> decoders
//   codes finished (8 arrivals)              decoders -> producer
//   halves arrived (TMA bytes | 8 arrivals)  producer | decoders -> consumers
//   halves finished (8 arrivals)             consumers -> producer | decoders
#pragma once
#include "cuda/kernels/grouped_mm.h"
#include "cuda/kernels/grouped_mm_operands.h"
#include "cuda/kernels/tensor_core_sm90.h"
#include "cuda/kernels/to_bf16.h"

namespace mxmoe::cuda::grouped_mm_sm90 {

using grouped_mm::globals, grouped_mm::OperandTensors;

template <Operand kOperandFormat, bool kBF16Operands, Output kOutputType, bool kBColumnCopy>
struct config {
  static constexpr Operand kOperand = kOperandFormat;
  static constexpr bool kBF16 = kBF16Operands, kDecoded = kOperand != Operand::kHalf, kBColumns = kBColumnCopy;
  static constexpr Output kOutput = kOutputType;
  using Halves = operand_layout<Operand::kHalf, kBColumns, 4>;           // what is multiplied
  using Layout = operand_layout<kOperand, kBColumns, kDecoded ? 2 : 4>;  // what is brought
  static constexpr int kRows = Halves::kRows, kColumns = Halves::kColumns;
  static constexpr int kConsumers = 8, kProducer = kConsumers, kDecoders = kDecoded ? 8 : 0,
                       kWarps = kConsumers + 1 + kDecoders;
};

template <class C, bool kDecoded = C::kDecoded>
struct shared {
  operand_ring<typename C::Halves> halves;
  MXMOE_KERNEL auto& brought() { return halves; }
};
template <class C>
struct shared<C, true> {
  operand_ring<typename C::Halves> halves;
  operand_ring<typename C::Layout> codes;
  MXMOE_KERNEL auto& brought() { return codes; }
};

template <class M, class C>
MXMOE_KERNEL void decode(M& m, const globals<M>& g, shared<C>& s) {
  m.role("decoder");
  const bool is_b = m.warp_idx() - C::kProducer > 4;
  const ElementBits element = element_bits_of<C::kOperand>(is_b ? g.b_element : g.a_element);
  Decoding<C> at;
  OutputTile tile;
  const int column_tiles = static_cast<int>(ceil_div(g.outputs, C::kColumns));
  for (auto walk = TileWalk<>::begin(m, g.groups, column_tiles); walk.advance(m, tile);) {
    if (tile.group == g.groups.num_groups) break;
    decode_tile<C>(m, s.codes, s.halves, at, element, is_b, g.contraction);
  }
}

template <class M, class C>
MXMOE_KERNEL void multiply(M& m, const globals<M>& g, shared<C>& s, ring<C::Halves::kStages>& at, int warpgroup,
                           typename M::template registers<float, 64>& d) {
  using Halves = typename C::Halves;
  const auto one = m.elect_one();
  tensor_core::SlotInFlight in_flight;
  for (int k = 0; k < g.contraction; k += Halves::kStep, at.advance()) {
    m.mbarrier_wait(s.halves.arrived[at.slot], at.parity);
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
  const bool aligned = pairs_aligned<C::kOutput>(g.out, g.out_stride, g.outputs);
  ring<C::Halves::kStages> at;
  OutputTile tile;
  const int column_tiles = static_cast<int>(ceil_div(g.outputs, C::kColumns));
  for (auto walk = TileWalk<>::begin(m, g.groups, column_tiles); walk.advance(m, tile);) {
    const bool product = tile.group < g.groups.num_groups;
    typename M::template registers<float, 64> d;
    unrolled<64>([&](int i) { d[i] = F{}; });
    if (product) multiply<M, C>(m, g, s, at, warpgroup, d);
    const auto first_row = lane / 4 + (wgmma_row(m.warp_idx() % 4, 0, 0) + 64 * warpgroup);
    F a_global[2] = {};  // of the lane's two rows
    if constexpr (C::kOperand == Operand::kNvfp4)
      for (int i = 0; i < 2 && product; ++i)
        a_global[i] =
            m.template ld_global<float>(g.a_global + tile.row, (first_row + 8 * i) * 4, first_row + 8 * i < tile.rows);
    unrolled<32>([&](int pair) {  // two columns of one row
      const int i = 2 * pair;
      const auto row = first_row + wgmma_row(0, 0, i);
      const auto column = wgmma_column(0, i) + tile.column_tile * C::kColumns + lane % 4 * 2;
      F y[2] = {d[i], d[i + 1]};
      for (int j = 0; j < 2; ++j) {
        if (!product) continue;
        const int64_t first = int64_t{tile.group} * g.outputs;
        const auto load = [&](const float* p) {
          return m.template ld_global<float>(p + first, (column + j) * 4, column + j < g.outputs);
        };
        if constexpr (C::kOperand == Operand::kNvfp4) y[j] = y[j] * a_global[pair % 2] * load(g.b_global);
        if (g.bias) y[j] = y[j] + load(g.bias);
      }
      uint8_t* out = static_cast<uint8_t*>(g.out) + tile.row * g.out_stride * bytes_of(C::kOutput);
      store_pair<C::kOutput>(m, out, (row * static_cast<int>(g.out_stride) + column) * bytes_of(C::kOutput), y, column,
                             g.outputs, aligned, row < tile.rows);
    });
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  auto& s = m.template shared<shared<C>>();
  const auto one = m.elect_one();
  if (m.warp_idx() == 0) {
    for (int i = 0; i < C::Halves::kStages; ++i)
      m.mbarrier_init(s.halves.arrived[i], C::kDecoded ? C::kDecoders : 1, one),
          m.mbarrier_init(s.halves.finished[i], C::kConsumers, one);
    if constexpr (C::kDecoded)
      for (int i = 0; i < C::Layout::kStages; ++i)
        m.mbarrier_init(s.codes.arrived[i], 1, one), m.mbarrier_init(s.codes.finished[i], C::kDecoders, one);
    m.fence_mbarrier_init();
  }
  m.syncthreads();
  if (m.warp_idx() < C::kConsumers)
    consume<M, C>(m, g, s);
  else if (m.warp_idx() == C::kProducer)
    grouped_mm::produce<typename C::Layout>(m, g, s.brought());
  else if constexpr (C::kDecoded)
    decode<M, C>(m, g, s);
}

MXMOE_LAUNCHABLE("grouped_mm", shared<C>)

// BF16 and FP16: kBF16 says which.
template <Operand kOperand, bool kBF16, class L>
void launch(L& l, const OperandTensors& a, const OperandTensors& b, bool b_columns, const Tensor& offs,
            const Tensor& bias, const Tensor& arrived, int64_t minibatch, const Tensor& out) {
  with_output(out.dtype, [&]<Output kOutput>() {
    const auto run = [&]<bool kBColumns>() {
      using C = config<kOperand, kBF16, kOutput, kBColumns>;
      grouped_mm::launch<launchable<C>, typename C::Layout>(l, a, b, offs, bias, arrived, minibatch, out);
    };
    if constexpr (kOperand != Operand::kNvfp4)
      if (b_columns) return run.template operator()<true>();
    run.template operator()<false>();
  });
}

}  // namespace mxmoe::cuda::grouped_mm_sm90
