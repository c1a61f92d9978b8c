// What grouped_mm brings to shared memory on every architecture: slots of 128 bytes of contraction of 128 rows of A and
// 128 outputs of B; the warp that fills them; the kernels' arguments.
#pragma once
#include "cuda/kernels/arrivals.h"
#include "cuda/kernels/operand_ring.h"
#include "cuda/kernels/schedule.h"
#include "cuda/launch.h"

namespace mxmoe::cuda {

// kCtaCount: 2 for a pair of CTAs that share a tile of twice the rows; each has its own rows of A and half the lines of
// B.
template <Operand kOperandFormat, bool kBColumnCopy, int kStageCount, int kCtaCount = 1>
struct operand_layout : operand_facts<kOperandFormat> {
  using facts = operand_facts<kOperandFormat>;
  static constexpr bool kAColumns = false, kBColumns = kBColumnCopy;
  static_assert(!kBColumns || kOperandFormat != Operand::kNvfp4, "4-bit operands are K-major");
  static constexpr int kRows = kTileRows, kColumns = 128, kStages = kStageCount, kCtas = kCtaCount;
  static constexpr int kBOutputs = kColumns / kCtas;
  // Boxes of B in a slot: lines of outputs, or lines of the contraction, as many as the outputs need side by side.
  static constexpr int kBLines = kBColumns ? facts::kStep : kBOutputs, kABlocks = 1,
                       kBBlocks = kBColumns ? kBOutputs / facts::kStep : 1;
  static_assert(kBBlocks > 0, "a line of B has 128 bytes");
  using a_tile = st<kRows, facts::kStepBytes, Swizzle::k128B>;
  using b_tile = st<kBLines, facts::kStepBytes, Swizzle::k128B>;
};

namespace grouped_mm {

template <class M>
struct globals {
  typename M::tensor_map a, b;  // (rows, contraction), (experts * outputs, contraction), boxes of 128 lines x 128 bytes
  typename M::tensor_map a_scale_tiles, b_scale_tiles;  // pairs: the scales as lines of 128 bytes, boxes of a slot's
  const uint8_t *a_scales, *b_scales;                   // blocked; a's by padded rows, b's one matrix per expert
  const float *a_global, *b_global;                     // NVFP4: one per row, one per expert and output
  const float* bias;                                    // (experts, outputs) or null
  void* out;                                            // (rows, outputs), out_stride elements apart
  Groups groups;
  Arrivals arrivals;         // of a's rows
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
  const int rank = L::kCtas == 1 ? 0 : m.cluster_ctarank();
  const int num_rows = g.arrivals.counts ? static_cast<int>(g.groups.end(m, g.groups.num_groups - 1)) : 0;
  for (auto walk = TileWalk<L::kCtas>::begin(m, g.groups, column_tiles); walk.advance(m, tile);) {
    if (tile.group == g.groups.num_groups) break;
    const int column = tile.column_tile * L::kColumns + rank * L::kBOutputs;
    const int64_t a_tile = tile.padded_tile * g.scale_tiles,
                  b_tile = (int64_t{tile.group} * column_tiles + tile.column_tile) * g.scale_tiles;
    if (g.arrivals.counts) {
      const auto first = static_cast<int>(tile.row), end = first + L::kRows;  // the box, past the group's end too
      g.arrivals.wait(m, first, end < num_rows ? end : num_rows, num_rows);
      m.fence_proxy_async_global();
    }
    for (int step = 0; step < g.steps; ++step, at.advance()) {
      auto& slot = s.slots[at.slot];
      auto& arrived = s.arrived[at.slot];
      m.mbarrier_wait(s.finished[at.slot], at.parity ^ 1);
      const int b_column = L::kBColumns ? column : step * L::kMapStep,
                b_row = L::kBColumns ? tile.group * g.contraction + step * L::kStep : tile.group * g.outputs + column;
      constexpr int kBlock = L::kBOutputs / L::kBBlocks;  // outputs of a box of column copies
      constexpr uint32_t kBytes = (L::kRows + L::kBOutputs) * L::kStepBytes;
      if constexpr (L::kCtas == 1) {
        const uint32_t scale_bytes = L::scale_tiles(g.contraction - step * L::kStep) * scale_tile::num_bytes;
        m.mbarrier_arrive_expect_tx(arrived, kBytes + 2 * scale_bytes, one);
        m.tma_load(&slot.a, g.a, step * L::kMapStep, static_cast<int>(tile.row), arrived, one);
        for (int i = 0; i < L::kBBlocks; ++i) m.tma_load(&slot.b[i], g.b, b_column + i * kBlock, b_row, arrived, one);
        if constexpr (L::kScaleTiles > 0) {
          m.bulk_load(slot.a_scales, g.a_scales + (a_tile + step * L::kScaleTiles) * kScaleTileBytes, scale_bytes,
                      arrived, one);
          m.bulk_load(slot.b_scales, g.b_scales + (b_tile + step * L::kScaleTiles) * kScaleTileBytes, scale_bytes,
                      arrived, one);
        }
      } else {  // the first CTA's barrier counts the bytes of both
        const uint32_t of_both = m.mapa(m.shared_address(&arrived), 0);
        if (rank == 0)
          m.mbarrier_arrive_expect_tx(arrived, 2 * (kBytes + 2 * L::kScaleTiles * scale_tile::num_bytes), one);
        m.tma_load_pair(&slot.a, g.a, step * L::kMapStep, static_cast<int>(tile.row), of_both, one);
        for (int i = 0; i < L::kBBlocks; ++i)
          m.tma_load_pair(&slot.b[i], g.b, b_column + i * kBlock, b_row, of_both, one);
        if constexpr (L::kScaleTiles > 0) {
          const auto line = [&](int64_t tile) { return static_cast<int>((tile + step * L::kScaleTiles) * 4); };
          m.tma_load_pair(slot.a_scales, g.a_scale_tiles, 0, line(a_tile), of_both, one);
          m.tma_load_pair(slot.b_scales, g.b_scale_tiles, 0, line(b_tile), of_both, one);
        }
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

// offs (E,); bias FP32 (E, O) or none; out (M, O) FP32, BF16 or FP16, rows of unit stride. arrived: flags of
// minibatches of a's rows that are waited for, or none; a's scales are there already.
template <class K, class Layout, class L>
void launch(L& l, const OperandTensors& a, const OperandTensors& b, const Tensor& offs, const Tensor& bias,
            const Tensor& arrived, int64_t minibatch, const Tensor& out) {
  globals<typename L::machine> g{};
  g.arrivals = arrivals_of(arrived, minibatch);
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
  if constexpr (Layout::kCtas == 2 && Layout::kScaleTiles > 0) {
    const auto tiles = [&](Tensor t) {
      t.ndim = 2, t.sizes[0] = t.sizes[0] / 128, t.sizes[1] = 128, t.strides[0] = 128, t.strides[1] = 1;
      return l.tensor_map(t, 4 * Layout::kScaleTiles, 128, Swizzle::kNone);
    };
    g.a_scale_tiles = tiles(a.scales), g.b_scale_tiles = tiles(b.scales);
  }
  const int ctas = l.num_sms() / Layout::kCtas * Layout::kCtas;
  l.template run<K>(ctas ? ctas : Layout::kCtas, g,
                    {{"a", a.values},
                     {"a scales", a.scales},
                     {"a global", a.global},
                     {"b", b.values},
                     {"b scales", b.scales},
                     {"b global", b.global},
                     {"offs", offs},
                     {"bias", bias},
                     {"arrived", arrived},
                     {"out", out, Use::kWritten}});
}

}  // namespace grouped_mm
}  // namespace mxmoe::cuda
