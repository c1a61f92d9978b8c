// grouped_mm on sm_100a: out[r] = a[r] . b[e]^T for the rows of every group e, by the block-scaled tensor core.
//
// One persistent CTA per SM, six warps. The producer brings 128 bytes of contraction of 128 rows of A and kColumns of B
// by TMA, and their block scales, into a ring of slots. The issuer copies the scales to tensor memory and multiplies;
// tensor memory holds two accumulators, so that four epilogue warps drain one while the other fills. Rows of a tile
// past the end of its group are multiplied and not written; rows past the last group are written as zero. B's lines run
// along the contraction, or (column copies of weights, for dgrad) along the outputs: then it is read MN-major.
//
//   slot arrived (TMA bytes)      producer -> issuer
//   slot finished (commit)        issuer   -> producer
//   output arrived (commit)       issuer   -> epilogue
//   output finished (4 arrivals)  epilogue -> issuer
#pragma once
#include "cuda/kernels/grouped_mm.h"
#include "cuda/kernels/grouped_mm_operands.h"

namespace mxmoe::cuda::grouped_mm_sm100 {

using grouped_mm::globals, grouped_mm::OperandTensors;

template <Operand kOperandFormat, Output kOutputType, bool kBColumnCopy = false>
struct config : operand_layout<kOperandFormat, kBColumnCopy, 4> {
  using Layout = operand_layout<kOperandFormat, kBColumnCopy, 4>;
  static constexpr Output kOutput = kOutputType;
  static constexpr MmaKind kKind = kOperandFormat == Operand::kHalf    ? MmaKind::kF16
                                   : kOperandFormat == Operand::kMxfp8 ? MmaKind::kMxf8f6f4
                                                                       : MmaKind::kMxf4nvf4;
  static constexpr int kWarps = 6, kEpilogueWarps = 4;
  // Tensor memory: two accumulators, then the scale words of a slot.
  static constexpr uint32_t kScalesA = 2 * Layout::kColumns, kScalesB = kScalesA + 16, kTmemColumns = 512;
  static_assert(kScalesB + 16 <= kTmemColumns, "accumulators and scales must fit in tensor memory");
};

template <class C>
struct shared : operand_ring<typename C::Layout> {
  barrier output_arrived[2], output_finished[2];
  uint32_t tmem;
};

// One slot: its scales to tensor memory, then four steps of 32 bytes of contraction.
template <class M, class C>
MXMOE_KERNEL void multiply_slot(M& m, const globals<M>& g, operand_slot<typename C::Layout>& slot, uint32_t tmem,
                                uint32_t d, int scale_tiles, bool first, typename M::pred one) {
  const MmaShape shape{C::kRows, C::kColumns, false, C::kBColumns};
  if constexpr (C::kScaleTiles > 0)
    for (int i = 0; i < scale_tiles; ++i) {
      const uint32_t column = static_cast<uint32_t>(4 * i);
      m.tcgen05_cp_32x128b_warpx4(tmem + C::kScalesA + column,
                                  tcgen05_descriptor(scale_tile::as_operand(m.shared_address(&slot.a_scales[i]))), one);
      m.tcgen05_cp_32x128b_warpx4(tmem + C::kScalesB + column,
                                  tcgen05_descriptor(scale_tile::as_operand(m.shared_address(&slot.b_scales[i]))), one);
    }
  const uint64_t a = tcgen05_descriptor(C::a_tile::k_major(m.shared_address(&slot.a)));
  const uint32_t b_address = m.shared_address(&slot.b[0]);
  const uint64_t b = tcgen05_descriptor(C::kBColumns ? C::b_tile::mn_major(b_address) : C::b_tile::k_major(b_address));
  constexpr uint32_t kBStepBytes = C::kBColumns ? C::kStep / 4 * C::kStepBytes : 32;
  for (int k = 0; k < C::kStepBytes / 32; ++k) {
    if (C::kOperand == Operand::kNvfp4 && k >= scale_tiles) break;  // the contraction ends here
    uint32_t instruction = 0, scales = 0;
    if constexpr (C::kOperand == Operand::kHalf) instruction = instruction_descriptor_f16(shape, g.a_element != 0);
    if constexpr (C::kOperand == Operand::kMxfp8)
      instruction = instruction_descriptor_mxf8f6f4(shape, static_cast<uint32_t>(g.a_element),
                                                    static_cast<uint32_t>(g.b_element), static_cast<uint32_t>(k));
    if constexpr (C::kOperand == Operand::kNvfp4)
      instruction = instruction_descriptor_mxf4nvf4(shape), scales = static_cast<uint32_t>(4 * k);
    m.template tcgen05_mma<C::kKind>(d, advance(a, static_cast<uint32_t>(32 * k)),
                                     advance(b, static_cast<uint32_t>(k) * kBStepBytes), instruction, !first || k > 0,
                                     tmem + C::kScalesA + scales, tmem + C::kScalesB + scales, one);
  }
}

template <class M, class C>
MXMOE_KERNEL void issue(M& m, const globals<M>& g, shared<C>& s, uint32_t tmem) {
  m.role("issuer");
  const auto one = m.elect_one();
  ring<C::kStages> at;
  ring<2> output;
  OutputTile tile;
  const int column_tiles = static_cast<int>(ceil_div(g.outputs, C::kColumns));
  for (auto walk = TileWalk::begin(m, g.groups, column_tiles); walk.advance(m, tile); output.advance()) {
    if (tile.group == g.groups.num_groups || g.steps == 0) break;
    m.mbarrier_wait(s.output_finished[output.slot], output.parity ^ 1);
    m.tcgen05_fence_after_thread_sync();
    const uint32_t d = tmem + static_cast<uint32_t>(output.slot * C::kColumns);
    for (int step = 0; step < g.steps; ++step, at.advance()) {
      m.mbarrier_wait(s.arrived[at.slot], at.parity);
      const int left = g.scale_tiles - step * C::kScaleTiles, tiles = left < C::kScaleTiles ? left : C::kScaleTiles;
      multiply_slot<M, C>(m, g, s.slots[at.slot], tmem, d, tiles, step == 0, one);
      m.tcgen05_commit(s.finished[at.slot], one);
    }
    m.tcgen05_commit(s.output_arrived[output.slot], one);
  }
}

// 16 columns of each lane's row: scaled and biased.
template <class M, class C, class F>
MXMOE_KERNEL void finish_columns(M& m, const globals<M>& g, F (&y)[16], int expert, int column) {
  for (int j = 0; j < 16; ++j) {
    const int64_t output = int64_t{expert} * g.outputs + column + j;
    if (column + j >= g.outputs || expert == g.groups.num_groups) continue;
    if constexpr (C::kOperand == Operand::kNvfp4) y[j] = y[j] * m.ld_global_uniform(g.b_global + output);
    if (g.bias) y[j] = y[j] + m.ld_global_uniform(g.bias + output);
  }
}

template <class M, class C>
MXMOE_KERNEL void drain(M& m, const globals<M>& g, shared<C>& s, uint32_t tmem) {
  using F = typename M::template lane<float>;
  m.role("epilogue");
  const auto one = m.elect_one();
  const int quarter = m.warp_idx() % 4 * 32;  // the lanes of tensor memory that this warp may read
  const auto row = m.lane_idx() + quarter;
  const bool aligned = output_aligned<C::kOutput>(g.out, g.out_stride, g.outputs);
  ring<2> output;
  OutputTile tile;
  const int column_tiles = static_cast<int>(ceil_div(g.outputs, C::kColumns));
  for (auto walk = TileWalk::begin(m, g.groups, column_tiles); walk.advance(m, tile);) {
    const bool product = tile.group < g.groups.num_groups && g.steps > 0;
    const auto writes = row < tile.rows;
    F a_global = {};
    if (C::kOperand == Operand::kNvfp4 && product)
      a_global = m.template ld_global<float>(g.a_global + tile.row, row * 4, writes);
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
        for (int j = 0; j < 16; ++j) {
          y[j] = __builtin_bit_cast(F, d[j]);
          if constexpr (C::kOperand == Operand::kNvfp4) y[j] = y[j] * a_global;
        }
      }
      const int first = tile.column_tile * C::kColumns + column;
      if (first >= g.outputs) continue;
      finish_columns<M, C>(m, g, y, tile.group, first);
      uint8_t* out = static_cast<uint8_t*>(g.out) + (tile.row * g.out_stride + first) * bytes_of(C::kOutput);
      store_columns<C::kOutput>(m, out, row * static_cast<int>(g.out_stride * bytes_of(C::kOutput)), y,
                                g.outputs - first, aligned, writes);
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
    for (int i = 0; i < C::kStages; ++i) m.mbarrier_init(s.arrived[i], 1, one), m.mbarrier_init(s.finished[i], 1, one);
    for (int i = 0; i < 2; ++i)
      m.mbarrier_init(s.output_arrived[i], 1, one), m.mbarrier_init(s.output_finished[i], C::kEpilogueWarps, one);
    m.fence_mbarrier_init();
  }
  if (m.warp_idx() == 1) m.tcgen05_alloc(m.shared_address(&s.tmem), C::kTmemColumns);
  m.tcgen05_fence_before_thread_sync();
  m.syncthreads();  // the other half of the fence comes before each role's first tcgen05 instruction
  const uint32_t tmem = m.ld_shared_uniform(m.shared_address(&s.tmem));

  if (m.warp_idx() == 0)
    grouped_mm::produce(m, g, static_cast<operand_ring<typename C::Layout>&>(s));
  else if (m.warp_idx() == 1)
    issue<M, C>(m, g, s, tmem);
  else
    drain<M, C>(m, g, s, tmem);

  m.syncthreads();
  m.tcgen05_fence_after_thread_sync();
  if (m.warp_idx() == 1) m.tcgen05_dealloc(tmem, C::kTmemColumns);
}

MXMOE_LAUNCHABLE("grouped_mm", shared<C>)

template <Operand kOperand, class L>
void launch(L& l, const OperandTensors& a, const OperandTensors& b, bool b_columns, const Tensor& offs,
            const Tensor& bias, const Tensor& out) {
  with_output(out.dtype, [&]<Output kOutput>() {
    const auto run = [&]<class C>() {
      grouped_mm::launch<launchable<C>, typename C::Layout>(l, a, b, offs, bias, out);
    };
    if constexpr (kOperand != Operand::kNvfp4)
      if (b_columns) return run.template operator()<config<kOperand, kOutput, true>>();
    run.template operator()<config<kOperand, kOutput>>();
  });
}

}  // namespace mxmoe::cuda::grouped_mm_sm100
