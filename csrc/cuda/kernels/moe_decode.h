// moe_decode: the experts for a few tokens, in two launches that stream every weight once. Output-neuron centric: a CTA
// has a few weight rows of every expert, its warps share the slots (token t, rank k) between them. A warp that finds
// its slot's expert in no slot before takes all slots of that expert.
//
// gate_up: rows of gate and of up, BF16 hidden values a = BF16(act(BF16(gate), BF16(up))) of each slot. down:
// BF16 outputs of each slot in shared memory, then their weighted sum in ascending rank.
#pragma once
#include "cuda/kernels/decode_weights.h"
#include "cuda/kernels/swiglu.h"

namespace mxmoe::cuda::moe_decode {

constexpr int kMostSlots = 1024;

// kMostTokens: of one expert at a time.
template <Weight kWeightFormat, int kMostTokens, bool kIsDown>
struct config {
  static constexpr Weight kWeight = kWeightFormat;
  static constexpr bool kDown = kIsDown;
  static constexpr int kWarps = 8, kTokens = kMostTokens, kRows = kTokens == 1 ? 4 : 2;  // what registers hold
};

struct outputs_of_slots {
  alignas(16) uint8_t y[kMostSlots * 4 * 4];  // FP32 (slots, rows of the CTA)
};
template <class C>
using shared = std::conditional_t<C::kDown, outputs_of_slots, nothing>;

template <class M>
struct globals {
  const uint8_t* x;  // BF16 rows: of tokens, or of slots (down)
  int64_t x_row_bytes;
  bool x_aligned, interleaved, to_bf16;
  const int32_t* ids;    // (slots,)
  const float* weights;  // (slots,)
  int slots, top_k;
  WeightRows w;
  swiglu::Activation activation;
  uint8_t* out;  // BF16 (slots, w.outputs / 2); down: BF16 or FP32 (tokens, w.outputs)
  int64_t out_row_bytes;
};

// The first slot from `from` on whose expert is `expert`, else the number of slots.
template <class M>
MXMOE_KERNEL int find_slot(M& m, const globals<M>& g, int expert, int from) {
  using U = typename M::template lane<uint32_t>;
  for (int base = from / 32 * 32; base < g.slots; base += 32) {
    const auto slot = m.lane_idx() + base;
    const auto inside = (slot >= from) & (slot < g.slots);
    const auto id = m.template ld_global<int>(g.ids + base, m.lane_idx() * 4, inside);
    const U found = m.template cast<uint32_t>(inside & (id == expert) ? slot : m.splat(g.slots));
    const int first = static_cast<int>(m.redux_min(found));
    if (first < g.slots) return first;
  }
  return g.slots;
}

template <class M, class F>
MXMOE_KERNEL F rounded(M& m, F x) {
  return to_float<Input::kBF16, 0>(m, m.cvt_bf16x2(x, x));
}

// What becomes of a slot's sums.
template <class C, class M, class F>
MXMOE_KERNEL void finish_slot(M& m, const globals<M>& g, int slot, const F (&y)[C::kRows]) {
  if constexpr (C::kDown) {
    using U = typename M::template lane<uint32_t>;
    F value = rounded(m, y[0]);
    unrolled<C::kRows - 1>([&](int r) { value = m.lane_idx() == r + 1 ? rounded(m, y[r + 1]) : value; });
    const U at = m.template cast<uint32_t>((m.lane_idx() + slot * C::kRows) * 4);
    m.st_shared(at + m.shared_address(m.template shared<shared<C>>().y), __builtin_bit_cast(U, value),
                m.lane_idx() < C::kRows);
  } else {
    constexpr int kPairs = C::kRows / 2;
    F a[kPairs];
    unrolled<kPairs>([&](int i) {
      const auto t = swiglu::terms(m, g.activation, rounded(m, y[2 * i]), rounded(m, y[2 * i + 1]));
      a[i] = t.gate * t.up;
    });
    const auto words = m.cvt_bf16x2(a[0], a[kPairs - 1]);
    const auto value = m.lane_idx() == 0 ? words & 0xffffu : words >> 16;
    const int first = m.cta_idx() * kPairs;
    m.template st_global<uint16_t>(g.out + slot * g.out_row_bytes + 2 * first, m.lane_idx() * 2,
                                   m.template cast<uint16_t>(value),
                                   (m.lane_idx() < kPairs) & (m.lane_idx() + first < g.w.outputs / 2));
  }
}

template <class C, class M>
MXMOE_KERNEL void weighted_sum(M& m, const globals<M>& g) {
  using F = typename M::template lane<float>;
  using I = typename M::template lane<int>;
  const int tokens = g.slots / g.top_k, first = m.cta_idx() * C::kRows;
  const uint32_t y = m.shared_address(m.template shared<shared<C>>().y);
  for (int base = m.warp_idx() * 32; base < tokens * C::kRows; base += C::kWarps * 32) {
    const I token = (m.lane_idx() + base) / C::kRows, row = (m.lane_idx() + base) % C::kRows;
    const auto inside = token < tokens;
    F total{};
    for (int k = 0; k < g.top_k; ++k) {
      const I slot = inside ? token * g.top_k + k : I{};
      const auto id = m.template ld_global<int>(g.ids, slot * 4, slot >= 0);
      const F weight = m.template ld_global<float>(g.weights, slot * 4, slot >= 0);
      const F of_slot = __builtin_bit_cast(F, m.ld_shared(m.template cast<uint32_t>((slot * C::kRows + row) * 4) + y));
      total = (id >= 0) & (id < g.w.experts) ? total + of_slot * weight : total;
    }
    const auto writes = inside & (row + first < g.w.outputs);
    const I line = inside ? token * static_cast<int>(g.out_row_bytes) : I{};
    if (g.to_bf16)
      m.template st_global<uint16_t>(g.out, line + (row + first) * 2,
                                     m.template cast<uint16_t>(m.cvt_bf16x2(total, total) & 0xffffu), writes);
    else
      m.template st_global<float>(g.out, line + (row + first) * 4, total, writes);
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using F = typename M::template lane<float>;
  m.role("moe_decode");
  const F none[C::kRows] = {};
  int rows[C::kRows];
  unrolled<C::kRows>([&](int r) {
    const int pairs = g.w.outputs / 2, wanted = (m.cta_idx() * C::kRows + r) / (C::kDown ? 1 : 2);
    if (C::kDown)
      rows[r] = smaller(wanted, g.w.outputs - 1);  // past the last: computed again, not written
    else
      rows[r] = g.interleaved ? 2 * smaller(wanted, pairs - 1) + r % 2 : smaller(wanted, pairs - 1) + r % 2 * pairs;
  });
  for (int own = m.warp_idx(); own < g.slots; own += C::kWarps) {
    const int expert = m.ld_global_uniform(g.ids + own);
    if (expert < 0 || expert >= g.w.experts) {
      if constexpr (C::kDown) finish_slot<C>(m, g, own, none);
      continue;
    }
    if (find_slot(m, g, expert, 0) != own) continue;
    for (int slot = own; slot < g.slots;) {
      int slots[C::kTokens], count = 0;
      const uint8_t* x[C::kTokens];
      unrolled<C::kTokens>([&](int t) {
        slots[t] = slot, x[t] = nullptr;
        if (slot == g.slots) return;
        x[t] = g.x + (C::kDown ? slot : slot / g.top_k) * g.x_row_bytes;
        count = t + 1, slot = find_slot(m, g, expert, slot + 1);
      });
      F sums[C::kRows][C::kTokens];
      dot_products<C::kWeight>(m, g.w, expert, rows, x, g.x_aligned, count, sums);
      unrolled<C::kTokens>([&](int t) {
        if (t >= count) return;
        F y[C::kRows];
        unrolled<C::kRows>([&](int r) { y[r] = sums[r][t]; });
        finish_slot<C>(m, g, slots[t], y);
      });
    }
  }
  if constexpr (C::kDown) {
    m.syncthreads();
    weighted_sum<C>(m, g);
  }
}

MXMOE_LAUNCHABLE("moe_decode", shared<C>)

struct WeightTensors {
  Tensor values, scales, global, bias;
};

// One launch. x BF16: (T, D), or (T * K, F) (down); ids int32, weights FP32 (T, K); out BF16 (T * K, F), or BF16 or
// FP32 (T, D) (down).
template <Weight kWeight, bool kDown, class L>
void launch(L& l, const Tensor& x, const Tensor& ids, const Tensor& weights, const WeightTensors& w, bool interleaved,
            const swiglu::Activation& activation, const Tensor& out) {
  globals<typename L::machine> g{};
  g.x = x.ptr<uint8_t>(), g.x_row_bytes = x.strides[0] * 2, g.interleaved = interleaved;
  g.x_aligned = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && g.x_row_bytes % 16 == 0 && x.sizes[1] % 8 == 0;
  g.ids = ids.ptr<int32_t>(), g.weights = weights.ptr<float>();
  g.top_k = static_cast<int>(ids.sizes[1]), g.slots = static_cast<int>(ids.sizes[0]) * g.top_k;
  g.w = weight_rows(w.values, w.scales, w.global, w.bias, x.sizes[1], bits_of(kWeight)), g.activation = activation;
  g.out = out.ptr<uint8_t>(), g.out_row_bytes = out.strides[0] * bytes_of(out.dtype);
  g.to_bf16 = out.dtype == DType::kBF16;
  const auto run = [&]<int kTokens>() {
    using C = config<kWeight, kTokens, kDown>;
    l.template run<launchable<C>>(ceil_div(g.w.outputs, C::kRows), g,
                                  {{"x", x},
                                   {"ids", ids},
                                   {"weights", weights},
                                   {"values", w.values},
                                   {"scales", w.scales},
                                   {"global scales", w.global},
                                   {"bias", w.bias},
                                   {"out", out, Use::kWritten}});
  };
  if (ids.sizes[0] == 1) return run.template operator()<1>();
  return run.template operator()<4>();
}

}  // namespace mxmoe::cuda::moe_decode
