// What grouped_mm brings to shared memory on every architecture: slots of 128 bytes of contraction of 128 rows of A and
// 128 outputs of B; the warp that fills them; the kernels' arguments.
#pragma once
#include "cuda/kernels/operand_ring.h"
#include "cuda/kernels/schedule.h"
#include "cuda/launch.h"

namespace mxmoe::cuda {

template <Operand kOperandFormat, bool kBColumnCopy, int kStageCount>
struct operand_layout : operand_facts<kOperandFormat> {
  using facts = operand_facts<kOperandFormat>;
  static constexpr bool kAColumns = false, kBColumns = kBColumnCopy;
  static_assert(!kBColumns || kOperandFormat != Operand::kNvfp4, "4-bit operands are K-major");
  static constexpr int kRows = kTileRows, kColumns = 128, kStages = kStageCount;
  // Boxes of B in a slot: 128 lines of outputs, or lines of the contraction, as many as 128 outputs need side by side.
  static constexpr int kBLines = kBColumns ? facts::kStep : kColumns, kABlocks = 1,
                       kBBlocks = kBColumns ? kColumns / facts::kStep : 1;
  using a_tile = st<kRows, facts::kStepBytes, Swizzle::k128B>;
  using b_tile = st<kBLines, facts::kStepBytes, Swizzle::k128B>;
};

namespace grouped_mm {

template <class M>
struct globals {
  typename M::tensor_map a, b;  // (rows, contraction), (experts * outputs, contraction), boxes of 128 lines x 128 bytes
  const uint8_t *a_scales, *b_scales;  // blocked; a's by padded rows, b's one matrix per expert
  const float *a_global, *b_global;    // NVFP4: one per row, one per expert and output
  const float* bias;                   // (experts, outputs) or null
  void* out;                           // (rows, outputs), out_stride elements apart
  Groups groups;
  int outputs, contraction;  // elements
  int steps, scale_tiles;    // slots of the contraction; 512-byte scale tiles along it
  int a_element, b_element;  // MX: 0 E4M3, 1 E5M2; half: 0 FP16, 1 BF16
  int64_t out_stride;
};

template <class Layout, class M>
MXMOE_KERNEL void produce(M& m, const globals<M>& g, operand_ring<Layout>& s) {
  using L = Layout;
  m.role("producer");
  const auto one = m.elect_one();
  ring<L::kStages> at;
  OutputTile tile;
  const int column_tiles = static_cast<int>(ceil_div(g.outputs, L::kColumns));
  for (auto walk = TileWalk::begin(m, g.groups, column_tiles); walk.advance(m, tile);) {
    if (tile.group == g.groups.num_groups) break;
    const int column = tile.column_tile * L::kColumns;
    const int64_t a_tile = tile.padded_tile * g.scale_tiles,
                  b_tile = (int64_t{tile.group} * column_tiles + tile.column_tile) * g.scale_tiles;
    for (int step = 0; step < g.steps; ++step, at.advance()) {
      auto& slot = s.slots[at.slot];
      auto& arrived = s.arrived[at.slot];
      const uint32_t scale_bytes = L::scale_tiles(g.contraction - step * L::kStep) * scale_tile::num_bytes;
      m.mbarrier_wait(s.finished[at.slot], at.parity ^ 1);
      m.mbarrier_arrive_expect_tx(arrived, (L::kRows + L::kColumns) * L::kStepBytes + 2 * scale_bytes, one);
      m.tma_load(&slot.a, g.a, step * L::kMapStep, static_cast<int>(tile.row), arrived, one);
      for (int i = 0; i < L::kBBlocks; ++i) {
        if constexpr (L::kBColumns)
          m.tma_load(&slot.b[i], g.b, column + i * L::kColumns / L::kBBlocks,
                     tile.group * g.contraction + step * L::kStep, arrived, one);
        else
          m.tma_load(&slot.b[i], g.b, step * L::kMapStep, tile.group * g.outputs + column, arrived, one);
      }
      if constexpr (L::kScaleTiles > 0) {
        m.bulk_load(slot.a_scales, g.a_scales + (a_tile + step * L::kScaleTiles) * kScaleTileBytes, scale_bytes,
                    arrived, one);
        m.bulk_load(slot.b_scales, g.b_scales + (b_tile + step * L::kScaleTiles) * kScaleTileBytes, scale_bytes,
                    arrived, one);
      }
    }
  }
}

// values (lines, bytes or halves of contraction), lines 16 bytes apart, b's experts stacked; b's may be (contraction,
// outputs) instead, the contraction a multiple of a slot's. Scales blocked, a's by padded rows, b's one matrix per
// expert; global FP32 per line, NVFP4 only. element: 1 for E5M2 and BF16, 0 for E4M3 and FP16.
struct OperandTensors {
  Tensor values, scales, global;
  int element;
};

// offs (E,); bias FP32 (E, O) or none; out (M, O) FP32, BF16 or FP16, rows of unit stride.
template <class K, class Layout, class L>
void launch(L& l, const OperandTensors& a, const OperandTensors& b, const Tensor& offs, const Tensor& bias,
            const Tensor& out) {
  globals<typename L::machine> g{};
  g.groups = {offs.ptr<int32_t>(), static_cast<int>(offs.sizes[0]), 0, out.sizes[0]};
  g.a_scales = a.scales.ptr<uint8_t>(), g.b_scales = b.scales.ptr<uint8_t>();
  g.a_global = a.global.ptr<float>(), g.b_global = b.global.ptr<float>();
  g.bias = bias.ptr<float>();
  g.out = out.data, g.out_stride = out.strides[0];
  g.outputs = static_cast<int>(out.sizes[1]);
  g.a_element = a.element, g.b_element = b.element;
  g.a = l.tensor_map(a.values, Layout::kRows, Layout::kStepBytes, Swizzle::k128B);
  g.b = l.tensor_map(b.values, Layout::kBLines, Layout::kStepBytes, Swizzle::k128B);
  g.contraction = static_cast<int>(a.values.sizes[1]) * (Layout::kStep / Layout::kMapStep);
  g.steps = static_cast<int>(ceil_div(g.contraction, Layout::kStep));
  g.scale_tiles = static_cast<int>(ceil_div(g.contraction, Layout::kTileElements));
  l.template run<K>(l.num_sms(), g,
                    {{"a", a.values},
                     {"a scales", a.scales},
                     {"a global", a.global},
                     {"b", b.values},
                     {"b scales", b.scales},
                     {"b global", b.global},
                     {"offs", offs},
                     {"bias", bias},
                     {"out", out, Use::kWritten}});
}

}  // namespace grouped_mm
}  // namespace mxmoe::cuda
