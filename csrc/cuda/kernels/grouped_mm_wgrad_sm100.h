// grouped_mm_wgrad on sm_100a: out[e] (+)= sum over the tokens of group e of a (tokens, O)^T . b (tokens, C).
//
// Operands of 8 and 16 bits lie token by token, so the tensor core reads them MN-major: a slot is some tokens x 128
// features of each, as 128-byte lines. NVFP4's lie feature by feature, K-major. Groups of quantized operands are padded
// to 128 tokens with zeros; BF16 and FP16 ones are not: the issuer clears the lines of the next group in the last slot,
// and its own arrival finishes a slot too.
#pragma once
#include "cuda/kernels/grouped_mm.h"
#include "cuda/kernels/grouped_mm_wgrad_operands.h"
#include "cuda/kernels/tensor_core_sm100.h"

namespace mxmoe::cuda::grouped_mm_wgrad_sm100 {

using grouped_mm_wgrad::globals, grouped_mm_wgrad::OperandTensors;

template <Operand kOperandFormat, Output kOutputType, bool kAccumulateOutput>
struct config : gradient_layout<kOperandFormat, 4> {
  using Layout = gradient_layout<kOperandFormat, 4>;
  static constexpr Output kOutput = kOutputType;
  static constexpr bool kAccumulate = kAccumulateOutput;
  static constexpr int kWarps = tensor_core::kWarps;
};

template <class C>
using shared = tensor_core::shared<typename C::Layout>;

template <class M, class C>
MXMOE_KERNEL void issue(M& m, const globals<M>& g, shared<C>& s, uint32_t tmem) {
  m.role("issuer");
  const auto one = m.elect_one();
  ring<C::kStages> at;
  ring<2> output;
  GradientTile tile;
  for (auto walk = GradientWalk::begin(m, g.gradients); walk.advance(m, tile);) {
    if (tile.tokens == 0) continue;
    tensor_core::wait_drained<1>(m, s.output_finished[output.slot], output.parity ^ 1);
    const uint32_t d = tmem + static_cast<uint32_t>(output.slot * C::kColumns);
    for (int step = 0; step * C::kTokens < tile.tokens; ++step, at.advance()) {
      m.mbarrier_wait(s.arrived[at.slot], at.parity);
      const int left = tile.tokens - step * C::kTokens;
      if constexpr (C::kHalf)
        if (left < C::kTokens && left % C::kInstruction) {
          auto& slot = s.slots[at.slot];
          const int end = static_cast<int>(round_up(left, C::kInstruction));
          for (int i = 0; i < C::kBlocks; ++i)
            clear_lines(m, slot.a[i], left, end), clear_lines(m, slot.b[i], left, end);
          m.fence_proxy_async();
          m.syncwarp();
        }
      tensor_core::multiply_slot(m, s.slots[at.slot], tmem, d, left, g.a_element, g.b_element, step == 0, one);
      m.tcgen05_commit(s.finished[at.slot], one);
      if constexpr (C::kHalf) m.mbarrier_arrive(s.finished[at.slot], one);
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
  const auto row = m.lane_idx() + m.warp_idx() % 4 * 32;
  const bool aligned = output_aligned<C::kOutput>(g.out, g.out_stride, g.gradients.columns) &&
                       output_aligned<C::kOutput>(g.out, g.out_expert, g.gradients.columns);
  ring<2> output;
  GradientTile tile;
  for (auto walk = GradientWalk::begin(m, g.gradients); walk.advance(m, tile);) {
    const bool product = tile.tokens > 0;
    if (!product && C::kAccumulate) continue;
    const int64_t first_row = int64_t{tile.row_tile} * C::kRows;
    const auto writes = row < static_cast<int>(g.gradients.rows - first_row);
    float a_global = 0, b_global = 0;
    if constexpr (C::kFp4)
      if (product)
        a_global = m.ld_global_uniform(g.a_global + tile.expert),
        b_global = m.ld_global_uniform(g.b_global + tile.expert);
    if (product) {
      m.mbarrier_wait(s.output_arrived[output.slot], output.parity);
      m.tcgen05_fence_after_thread_sync();
    }
    for (int column = 0; column < C::kColumns; column += 16) {
      F y[16] = {};
      if (product) {
        tensor_core::load_columns(m, tmem, output.slot, column, y);
        if constexpr (C::kFp4)
          for (int j = 0; j < 16; ++j) y[j] = y[j] * a_global * b_global;
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
      tensor_core::arrive_drained<1>(m, s.output_finished[output.slot], one);
      output.advance();
    }
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  auto& s = m.template shared<shared<C>>();
  tensor_core::run(
      m, s, C::kHalf ? 2 : 1, [&] { grouped_mm_wgrad::produce<typename C::Layout>(m, g, s); },
      [&](uint32_t tmem) { issue<M, C>(m, g, s, tmem); }, [&](uint32_t tmem) { drain<M, C>(m, g, s, tmem); });
}

MXMOE_LAUNCHABLE("grouped_mm_wgrad", shared<C>)

template <Operand kOperand, class L>
void launch(L& l, const OperandTensors& a, const OperandTensors& b, const Tensor& offs, bool accumulate,
            const Tensor& out) {
  with_output(out.dtype, [&]<Output kOutput>() {
    const auto run = [&]<bool kAccumulate>() {
      using C = config<kOperand, kOutput, kAccumulate>;
      grouped_mm_wgrad::launch<launchable<C>, typename C::Layout>(l, a, b, offs,
                                                                  kAccumulate ? Use::kUpdated : Use::kWritten, out);
    };
    if (accumulate)
      run.template operator()<true>();
    else
      run.template operator()<false>();
  });
}

}  // namespace mxmoe::cuda::grouped_mm_wgrad_sm100
