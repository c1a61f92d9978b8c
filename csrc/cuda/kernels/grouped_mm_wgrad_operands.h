// What grouped_mm_wgrad brings to shared memory on every architecture: slots of some tokens of 128 features of each
// operand; the warp that fills them; the kernels' arguments.
#pragma once
#include "cuda/kernels/operand_ring.h"
#include "cuda/kernels/schedule.h"
#include "cuda/launch.h"

namespace mxmoe::cuda {

// Operands lie token by token, and the tensor core reads them MN-major; 4-bit ones feature by feature, K-major.
template <Operand kOperandFormat, int kStageCount, bool kMNMajor = kOperandFormat != Operand::kNvfp4>
struct gradient_layout : operand_facts<kOperandFormat> {
  using facts = operand_facts<kOperandFormat>;
  static constexpr bool kAColumns = kMNMajor, kBColumns = kMNMajor;
  static constexpr int kRows = 128, kColumns = 128, kStages = kStageCount, kCtas = 1;
  static constexpr int kTokens = facts::kStep;
  // Boxes of an operand in a slot: lines of tokens, as many as 128 features need side by side; or 128 of features.
  static constexpr int kLines = kMNMajor ? kTokens : 128, kBlocks = kMNMajor ? 128 / kTokens : 1, kABlocks = kBlocks,
                       kBBlocks = kBlocks;
  using a_tile = st<kLines, facts::kStepBytes, Swizzle::k128B>;
  using b_tile = a_tile;
};

namespace grouped_mm_wgrad {

template <class M>
struct globals {
  typename M::tensor_map a, b;         // (tokens, features), O and C of them; NVFP4: (features, bytes of tokens)
  const uint8_t *a_scales, *b_scales;  // one blocked matrix per group, of its padded tokens
  const float *a_global, *b_global;    // NVFP4: one per group
  void* out;                           // (experts, O, C)
  int64_t out_expert, out_stride;      // elements from one expert, from one row to the next
  Gradients gradients;
  int a_element, b_element;  // MX: 0 E4M3, 1 E5M2; half: 0 FP16, 1 BF16
};

// Bytes before the scales of a tile of 128 of `features` lines, from the group's scale tile `first` along the tokens
// on.
template <class Layout>
MXMOE_FACT int64_t scale_offset(const GradientTile& t, int features, int feature_tile, int first) {
  const int64_t tiles = round_up(t.tokens, kGroupAlignment) / Layout::kTileElements;
  return (round_up(features, kScaleTileRows) / kScaleTileRows * (t.start / Layout::kTileElements) +
          feature_tile * tiles + first) *
         kScaleTileBytes;
}

template <class Layout, class M>
MXMOE_KERNEL void produce(M& m, const globals<M>& g, operand_ring<Layout>& s) {
  using L = Layout;
  m.role("producer");
  const auto one = m.elect_one();
  ring<L::kStages> at;
  GradientTile tile;
  for (auto walk = GradientWalk::begin(m, g.gradients); walk.advance(m, tile);) {
    const int row = tile.row_tile * L::kRows, column = tile.column_tile * L::kColumns;
    for (int step = 0; step * L::kTokens < tile.tokens; ++step, at.advance()) {
      auto& slot = s.slots[at.slot];
      auto& arrived = s.arrived[at.slot];
      const int token = static_cast<int>(tile.start) + step * L::kTokens;
      const uint32_t scale_bytes = L::scale_tiles(tile.tokens - step * L::kTokens) * scale_tile::num_bytes;
      m.mbarrier_wait(s.finished[at.slot], at.parity ^ 1);
      m.mbarrier_arrive_expect_tx(arrived, (L::kRows + L::kColumns) * L::kStepBytes + 2 * scale_bytes, one);
      for (int i = 0; i < L::kBlocks; ++i) {
        const int feature = i * (L::kRows / L::kBlocks);
        if constexpr (L::kAColumns) {
          m.tma_load(&slot.a[i], g.a, row + feature, token, arrived, one);
          m.tma_load(&slot.b[i], g.b, column + feature, token, arrived, one);
        } else {  // two tokens a byte
          m.tma_load(&slot.a[i], g.a, token / 2, row, arrived, one);
          m.tma_load(&slot.b[i], g.b, token / 2, column, arrived, one);
        }
      }
      if constexpr (L::kScaleTiles > 0) {
        const int first = step * L::kScaleTiles;
        m.bulk_load(slot.a_scales, g.a_scales + scale_offset<L>(tile, g.gradients.rows, tile.row_tile, first),
                    scale_bytes, arrived, one);
        m.bulk_load(slot.b_scales, g.b_scales + scale_offset<L>(tile, g.gradients.columns, tile.column_tile, first),
                    scale_bytes, arrived, one);
      }
    }
  }
}

// values (tokens, features), or (features, tokens / 2) of NVFP4, rows 16 bytes apart, groups padded to 128 tokens but
// of halves; scales: the groups' blocked matrices one after the other; global FP32 (E,), NVFP4 only. element: 1 for
// E5M2 and BF16, 0 for E4M3 and FP16.
struct OperandTensors {
  Tensor values, scales, global;
  int element;
};

// offs (E,); out (E, O, C) FP32, BF16 or FP16, rows of unit stride.
template <class K, class Layout, class L>
void launch(L& l, const OperandTensors& a, const OperandTensors& b, const Tensor& offs, Use use, const Tensor& out) {
  globals<typename L::machine> g{};
  g.a_scales = a.scales.ptr<uint8_t>(), g.b_scales = b.scales.ptr<uint8_t>();
  g.a_global = a.global.ptr<float>(), g.b_global = b.global.ptr<float>();
  g.out = out.data, g.out_expert = out.strides[0], g.out_stride = out.strides[1];
  g.gradients = gradients_of(offs, out, !Layout::kHalf);
  g.a_element = a.element, g.b_element = b.element;
  g.a = l.tensor_map(a.values, Layout::kLines, Layout::kStepBytes, Swizzle::k128B);
  g.b = l.tensor_map(b.values, Layout::kLines, Layout::kStepBytes, Swizzle::k128B);
  l.template run<K>(l.num_sms(), g,
                    {{"a", a.values},
                     {"a scales", a.scales},
                     {"a global", a.global},
                     {"b", b.values},
                     {"b scales", b.scales},
                     {"b global", b.global},
                     {"offs", offs},
                     {"out", out, use}});
}

}  // namespace grouped_mm_wgrad
}  // namespace mxmoe::cuda
