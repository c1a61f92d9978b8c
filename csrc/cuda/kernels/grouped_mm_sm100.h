// grouped_mm on sm_100a: out[r] = a[r] . b[e]^T for the rows of every group e, by the block-scaled tensor core.
//
// One persistent CTA per SM, six warps (tensor_core_sm100.h), or pairs of them that share tiles of 256 rows. The
// producer brings 128 bytes of contraction of 128 rows of A and 128 outputs of B by TMA, and their block scales, into a
// ring of slots. The issuer copies the scales to tensor memory and multiplies. Rows of a tile past the end of its group
// are multiplied and not written; rows past the last group are written as zero. B's lines run along the contraction, or
// (column copies of weights, for dgrad) along the outputs: then it is read MN-major.
#pragma once
#include "cuda/kernels/grouped_mm.h"
#include "cuda/kernels/grouped_mm_operands.h"
#include "cuda/kernels/tensor_core_sm100.h"

namespace mxmoe::cuda::grouped_mm_sm100 {

using grouped_mm::globals, grouped_mm::OperandTensors;

template <Operand kOperandFormat, int kCtaCount, Output kOutputType, bool kBColumnCopy>
struct config : operand_layout<kOperandFormat, kBColumnCopy, kCtaCount == 2 ? 6 : 4, kCtaCount> {
  using Layout = operand_layout<kOperandFormat, kBColumnCopy, kCtaCount == 2 ? 6 : 4, kCtaCount>;
  static constexpr Output kOutput = kOutputType;
  static constexpr int kWarps = tensor_core::kWarps, kCluster = kCtaCount;
};

template <class C>
using shared = tensor_core::shared<typename C::Layout>;

template <class M, class C>
MXMOE_KERNEL void issue(M& m, const globals<M>& g, shared<C>& s, uint32_t tmem) {
  m.role("issuer");
  const auto one = m.elect_one();
  ring<C::kStages> at;
  ring<2> output;
  OutputTile tile;
  const int column_tiles = static_cast<int>(ceil_div(g.outputs, C::kColumns));
  for (auto walk = TileWalk<C::kCtas>::begin(m, g.groups, column_tiles); walk.advance(m, tile); output.advance()) {
    if (tile.group == g.groups.num_groups || g.steps == 0) break;
    tensor_core::wait_drained<C::kCtas>(m, s.output_finished[output.slot], output.parity ^ 1);
    const uint32_t d = tmem + static_cast<uint32_t>(output.slot * C::kColumns);
    for (int step = 0; step < g.steps; ++step, at.advance()) {
      m.mbarrier_wait(s.arrived[at.slot], at.parity);
      tensor_core::multiply_slot(m, s.slots[at.slot], tmem, d, g.contraction - step * C::kStep, g.a_element,
                                 g.b_element, step == 0, one);
      tensor_core::commit<C::kCtas>(m, s.finished[at.slot], one);
    }
    tensor_core::commit<C::kCtas>(m, s.output_arrived[output.slot], one);
  }
}

// 16 columns of each lane's row: scaled and biased.
template <class M, class C, class F>
MXMOE_KERNEL void finish_columns(M& m, const globals<M>& g, F (&y)[16], int expert, int column) {
  for (int j = 0; j < 16; ++j) {
    const int64_t output = int64_t{expert} * g.outputs + column + j;
    if (column + j >= g.outputs || expert == g.groups.num_groups) continue;
    if constexpr (C::kFp4) y[j] = y[j] * m.ld_global_uniform(g.b_global + output);
    if (g.bias) y[j] = y[j] + m.ld_global_uniform(g.bias + output);
  }
}

template <class M, class C>
MXMOE_KERNEL void drain(M& m, const globals<M>& g, shared<C>& s, uint32_t tmem) {
  using F = typename M::template lane<float>;
  m.role("epilogue");
  const auto one = m.elect_one();
  const auto row = m.lane_idx() + m.warp_idx() % 4 * 32;
  const bool aligned = output_aligned<C::kOutput>(g.out, g.out_stride, g.outputs);
  ring<2> output;
  OutputTile tile;
  const int column_tiles = static_cast<int>(ceil_div(g.outputs, C::kColumns));
  for (auto walk = TileWalk<C::kCtas>::begin(m, g.groups, column_tiles); walk.advance(m, tile);) {
    const bool product = tile.group < g.groups.num_groups && g.steps > 0;
    const auto writes = row < tile.rows;
    F a_global = {};
    if (C::kFp4 && product) a_global = m.template ld_global<float>(g.a_global + tile.row, row * 4, writes);
    if (product) {
      m.mbarrier_wait(s.output_arrived[output.slot], output.parity);
      m.tcgen05_fence_after_thread_sync();
    }
    for (int column = 0; column < C::kColumns; column += 16) {
      F y[16] = {};
      if (product) {
        tensor_core::load_columns(m, tmem, output.slot, column, y);
        if constexpr (C::kFp4)
          for (int j = 0; j < 16; ++j) y[j] = y[j] * a_global;
      }
      const int first = tile.column_tile * C::kColumns + column;
      if (first >= g.outputs) continue;
      finish_columns<M, C>(m, g, y, tile.group, first);
      uint8_t* out = static_cast<uint8_t*>(g.out) + (tile.row * g.out_stride + first) * bytes_of(C::kOutput);
      store_columns<C::kOutput>(m, out, row * static_cast<int>(g.out_stride * bytes_of(C::kOutput)), y,
                                g.outputs - first, aligned, writes);
    }
    if (product) {
      tensor_core::arrive_drained<C::kCtas>(m, s.output_finished[output.slot], one);
      output.advance();
    }
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  auto& s = m.template shared<shared<C>>();
  tensor_core::run(
      m, s, 1, [&] { grouped_mm::produce<typename C::Layout>(m, g, s); },
      [&](uint32_t tmem) { issue<M, C>(m, g, s, tmem); }, [&](uint32_t tmem) { drain<M, C>(m, g, s, tmem); });
}

MXMOE_LAUNCHABLE("grouped_mm", shared<C>)

// Pairs where groups have 256 rows on average: each brings half of B, and a tile is rarely half empty. 8-bit column
// copies have lines of 128 outputs, which a pair would have to cut.
constexpr int64_t kPairRows = 256;
inline bool takes_pairs(Operand operand, bool b_columns, int64_t rows, int64_t groups) {
  return rows >= kPairRows * groups && !(b_columns && operand == Operand::kMxfp8);
}

template <Operand kOperand, class L>
void launch(L& l, const OperandTensors& a, const OperandTensors& b, bool b_columns, const Tensor& offs,
            const Tensor& bias, const Tensor& arrived, int64_t minibatch, const Tensor& out) {
  const bool pairs = takes_pairs(kOperand, b_columns, out.sizes[0], offs.sizes[0]);
  with_output(out.dtype, [&]<Output kOutput>() {
    const auto run = [&]<bool kBColumns, int kCtas>() {
      using C = config<kOperand, kCtas, kOutput, kBColumns>;
      grouped_mm::launch<launchable<C>, typename C::Layout>(l, a, b, offs, bias, arrived, minibatch, out);
    };
    if constexpr (kOperand != Operand::kNvfp4)
      if (b_columns && !pairs) return run.template operator()<true, 1>();
    if constexpr (kOperand == Operand::kHalf)
      if (b_columns) return run.template operator()<true, 2>();
    if (pairs) return run.template operator()<false, 2>();
    run.template operator()<false, 1>();
  });
}

}  // namespace mxmoe::cuda::grouped_mm_sm100
