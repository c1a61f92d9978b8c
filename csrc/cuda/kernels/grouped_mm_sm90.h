// grouped_mm on sm_90a: BF16 or FP16 operands, wgmma with accumulators in registers.
//
// One persistent CTA per SM: two warpgroups of consumers, 64 rows each of a tile of 128 x 128, and a producer warp that
// fills a ring of slots by TMA.
//
//   slot arrived (TMA bytes)     producer  -> consumers
//   slot finished (8 arrivals)   consumers -> producer
#pragma once
#include "cuda/kernels/grouped_mm.h"
#include "cuda/kernels/schedule.h"
#include "cuda/launch.h"
#include "cuda/tile/types.h"

namespace mxmoe::cuda::grouped_mm_sm90 {

template <bool kBF16Operands, Output kOutputType>
struct config {
  static constexpr bool kBF16 = kBF16Operands;
  static constexpr Output kOutput = kOutputType;
  static constexpr int kRows = kTileRows, kColumns = 128, kStages = 4, kStepBytes = 128, kConsumers = 8,
                       kWarps = kConsumers + 1;
};

template <class C>
struct shared {
  struct slot {
    st<C::kRows, C::kStepBytes, Swizzle::k128B> a;
    st<C::kColumns, C::kStepBytes, Swizzle::k128B> b;
  };
  slot slots[C::kStages];
  barrier arrived[C::kStages], finished[C::kStages];
};

template <class M>
struct globals {
  typename M::tensor_map a, b;  // (rows, contraction), (experts * outputs, contraction), boxes of 128 lines x 128 bytes
  const float* bias;            // (experts, outputs) or null
  void* out;                    // (rows, outputs), out_stride elements apart
  Groups groups;
  int outputs, steps;
  int64_t out_stride;
};

template <class M, class C>
MXMOE_KERNEL void produce(M& m, const globals<M>& g, shared<C>& s) {
  m.role("producer");
  const auto one = m.elect_one();
  ring<C::kStages> at;
  OutputTile tile;
  const int column_tiles = static_cast<int>(ceil_div(g.outputs, C::kColumns));
  for (auto walk = TileWalk::begin(m, g.groups, column_tiles); walk.advance(m, tile);) {
    if (tile.group == g.groups.num_groups) break;
    for (int step = 0; step < g.steps; ++step, at.advance()) {
      auto& slot = s.slots[at.slot];
      auto& arrived = s.arrived[at.slot];
      m.mbarrier_wait(s.finished[at.slot], at.parity ^ 1);
      m.mbarrier_arrive_expect_tx(arrived, decltype(slot.a)::num_bytes + decltype(slot.b)::num_bytes, one);
      m.tma_load(&slot.a, g.a, step * C::kStepBytes / 2, static_cast<int>(tile.row), arrived, one);
      m.tma_load(&slot.b, g.b, step * C::kStepBytes / 2, tile.group * g.outputs + tile.column_tile * C::kColumns,
                 arrived, one);
    }
  }
}

template <class M, class C>
MXMOE_KERNEL void consume(M& m, const globals<M>& g, shared<C>& s) {
  using F = typename M::template lane<float>;
  m.role("consumer");
  const auto one = m.elect_one();
  const int half = m.warp_idx() / 4 * 64;  // rows of this warpgroup
  const auto lane = m.lane_idx();
  const bool aligned = pairs_aligned<C::kOutput>(g.out, g.out_stride, g.outputs);
  ring<C::kStages> at;
  OutputTile tile;
  const int column_tiles = static_cast<int>(ceil_div(g.outputs, C::kColumns));
  for (auto walk = TileWalk::begin(m, g.groups, column_tiles); walk.advance(m, tile);) {
    const bool product = tile.group < g.groups.num_groups;
    typename M::template registers<float, 64> d;
    unrolled<64>([&](int i) { d[i] = F{}; });
    for (int step = 0; product && step < g.steps; ++step, at.advance()) {
      auto& slot = s.slots[at.slot];
      const uint64_t a = wgmma_descriptor(
          decltype(slot.a)::k_major(m.shared_address(&slot.a) + static_cast<uint32_t>(half * C::kStepBytes)));
      const uint64_t b = wgmma_descriptor(decltype(slot.b)::k_major(m.shared_address(&slot.b)));
      m.mbarrier_wait(s.arrived[at.slot], at.parity);
      m.wgmma_fence();
      for (uint32_t k = 0; k < C::kStepBytes; k += 32)
        m.template wgmma_m64n128k16<C::kBF16, false>(d, advance(a, k), advance(b, k), true);
      m.wgmma_commit_group();
      m.wgmma_wait_group(d);
      m.mbarrier_arrive(s.finished[at.slot], one);
    }
    unrolled<32>([&](int pair) {  // two columns of one row
      const int i = 2 * pair;
      const auto row = wgmma_row(m.warp_idx() % 4, 0, i) + half + lane / 4;
      const auto column = wgmma_column(0, i) + tile.column_tile * C::kColumns + lane % 4 * 2;
      F y[2] = {d[i], d[i + 1]};
      for (int j = 0; j < 2; ++j)
        if (g.bias && product)
          y[j] = y[j] + m.template ld_global<float>(g.bias + int64_t{tile.group} * g.outputs, (column + j) * 4,
                                                    column + j < g.outputs);
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
    for (int i = 0; i < C::kStages; ++i)
      m.mbarrier_init(s.arrived[i], 1, one), m.mbarrier_init(s.finished[i], C::kConsumers, one);
    m.fence_mbarrier_init();
  }
  m.syncthreads();
  if (m.warp_idx() == C::kConsumers)
    produce<M, C>(m, g, s);
  else
    consume<M, C>(m, g, s);
}

MXMOE_LAUNCHABLE("grouped_mm", shared<C>)

// a (M, contraction), b (experts * outputs, contraction), lines 16 bytes apart; offs (E,); bias FP32 (E, O) or none;
// out (M, O).
template <bool kBF16, class L>
void launch(L& l, const Tensor& a, const Tensor& b, const Tensor& offs, const Tensor& bias, const Tensor& out) {
  globals<typename L::machine> g{};
  g.groups = {offs.ptr<int32_t>(), static_cast<int>(offs.sizes[0]), 0, out.sizes[0]};
  g.bias = bias.ptr<float>();
  g.out = out.data, g.out_stride = out.strides[0];
  g.outputs = static_cast<int>(out.sizes[1]);
  with_output(out.dtype, [&]<Output kOutput>() {
    using C = config<kBF16, kOutput>;
    g.a = l.tensor_map(a, C::kRows, C::kStepBytes, Swizzle::k128B);
    g.b = l.tensor_map(b, C::kColumns, C::kStepBytes, Swizzle::k128B);
    g.steps = static_cast<int>(ceil_div(2 * a.sizes[1], C::kStepBytes));
    l.template run<launchable<C>>(l.num_sms(), g,
                                  {{"a", a}, {"b", b}, {"offs", offs}, {"bias", bias}, {"out", out, Use::kWritten}});
  });
}

}  // namespace mxmoe::cuda::grouped_mm_sm90
