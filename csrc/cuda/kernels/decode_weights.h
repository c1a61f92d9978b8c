// Weight rows as a decoding kernel streams them: 16 bytes a lane at a time, elements of any format exactly in FP32, the
// block scale applied to the sum of a block's products.
#pragma once
#include "cuda/kernels/arithmetic.h"
#include "cuda/kernels/elements.h"
#include "cuda/launch.h"
#include "cuda/tile/types.h"
#include "formats.h"

namespace mxmoe::cuda {

enum class Weight : uint8_t { kBF16, kMxfp8, kMxfp8E5m2, kMxfp4, kNvfp4 };

MXMOE_FACT int bits_of(Weight w) {
  return w == Weight::kBF16 ? 16 : w == Weight::kMxfp8 || w == Weight::kMxfp8E5m2 ? 8 : 4;
}

// (experts, outputs, contraction), contiguous along the contraction.
struct WeightRows {
  const uint8_t *values, *scales;  // scales null: BF16
  int64_t expert_bytes, row_bytes, expert_scales, row_scales;
  const float *global, *bias;  // (experts, outputs), each or null
  int experts, outputs, contraction, length_bytes;
  bool aligned;  // every row starts at, and is as long as, a multiple of 16 bytes
};

inline WeightRows weight_rows(const Tensor& values, const Tensor& scales, const Tensor& global, const Tensor& bias,
                              int64_t contraction, int bits) {
  const int64_t element = bytes_of(values.dtype);
  WeightRows w{};
  w.values = values.ptr<uint8_t>(), w.scales = scales.ptr<uint8_t>();
  w.expert_bytes = values.strides[0] * element, w.row_bytes = values.strides[1] * element;
  w.expert_scales = scales.strides[0], w.row_scales = scales.strides[1];
  w.global = global.ptr<float>(), w.bias = bias.ptr<float>();
  w.experts = static_cast<int>(values.sizes[0]), w.outputs = static_cast<int>(values.sizes[1]);
  w.contraction = static_cast<int>(contraction), w.length_bytes = static_cast<int>((contraction * bits + 7) / 8);
  w.aligned = reinterpret_cast<uintptr_t>(values.data) % 16 == 0 && w.expert_bytes % 16 == 0 && w.row_bytes % 16 == 0 &&
              contraction * bits % 128 == 0;
  return w;
}

// 16 bytes of each lane from `offset` on, zero past `length`.
template <class M, class I>
MXMOE_KERNEL void load_16(M& m, typename M::template registers<uint32_t, 4>& words, const void* base, I offset,
                          int length, bool aligned) {
  using U = typename M::template lane<uint32_t>;
  if (aligned) return m.ld_global_v4(words, base, offset, offset < length);
  unrolled<4>([&](int i) {
    U word{};
    for (int j = 0; j < 4; ++j) {
      const I at = offset + (4 * i + j);
      word = word | m.template cast<uint32_t>(m.template ld_global<uint8_t>(base, at, at < length)) << (8 * j);
    }
    words[i] = word;
  });
}

// Eight of a lane's elements, the kGroup-th of them, from its 16 bytes: FP32, 4-bit ones times 2^-14.
template <Weight kWeight, int kGroup, class M, class F>
MXMOE_KERNEL void decode_8(M& m, const typename M::template registers<uint32_t, 4>& words, F (&x)[8]) {
  using U = typename M::template lane<uint32_t>;
  const auto halves = [&](U pair, int low, int high) {
    x[low] = m.half_to_float(pair & 0xffffu), x[high] = m.half_to_float(pair >> 16);
  };
  unrolled<4>([&](int j) {
    if constexpr (kWeight == Weight::kBF16) {
      x[2 * j] = to_float<Input::kBF16, 0>(m, words.value[j]),
            x[2 * j + 1] = to_float<Input::kBF16, 1>(m, words.value[j]);
    } else if constexpr (bits_of(kWeight) == 8) {
      const U codes = words.value[2 * kGroup + j / 2] >> (16 * (j % 2));
      if constexpr (kWeight == Weight::kMxfp8)
        halves(m.cvt_f16x2_e4m3x2(codes), 2 * j, 2 * j + 1);
      else  // the upper half of an FP16
        halves((codes & 0xffu) << 8 | (codes & 0xff00u) << 16, 2 * j, 2 * j + 1);
    } else {  // the fields of two elements, four apart, into those of two FP16
      const U codes = words.value[kGroup] >> (4 * j);
      halves((codes & 0x70007u) << 9 | (codes & 0x80008u) << 12, j, j + 4);
    }
  });
}

// FP32 of a block scale's byte, with the factor that decode_8 leaves out.
template <Weight kWeight, class M, class U>
MXMOE_KERNEL auto decode_scale(M&, U byte) {
  using F = typename M::template lane<float>;
  if constexpr (kWeight == Weight::kNvfp4)
    return __builtin_bit_cast(F, decode_magnitude<E4M3, F, U>(byte)) * 0x1p14f;
  else
    return __builtin_bit_cast(F, e8m0_bits<U>(byte)) * (bits_of(kWeight) == 4 ? 0x1p14f : 1.0f);
}

// sums[r][t] = weight row rows[r] of an expert . x[t], BF16, for t < tokens; all lanes hold them. Lane j adds the
// elements of its pieces in order, then comes a tree.
template <Weight kWeight, int kRows, int kTokens, class M>
MXMOE_KERNEL void dot_products(M& m, const WeightRows& w, int expert, const int (&rows)[kRows],
                               const uint8_t* const (&x)[kTokens], bool x_aligned, int tokens,
                               typename M::template lane<float> (&sums)[kRows][kTokens]) {
  using F = typename M::template lane<float>;
  using I = typename M::template lane<int>;
  constexpr int kElements = 128 / bits_of(kWeight), kBlock = kWeight == Weight::kNvfp4 ? 16 : 32;
  constexpr int kGroups = kElements / 8, kGroupsOfBlock = kElements < kBlock ? kGroups : kBlock / 8;
  const uint8_t* base = w.values + int64_t{expert} * w.expert_bytes;
  unrolled<kRows>([&](int r) { unrolled<kTokens>([&](int t) { sums[r][t] = F{}; }); });
  for (int step = 0; step < w.contraction; step += 32 * kElements) {
    const I first = m.lane_idx() * kElements + step;
    typename M::template registers<uint32_t, 4> words[kRows];
    F partial[kRows][kTokens];
    unrolled<kRows>([&](int r) {
      load_16(m, words[r], base + rows[r] * w.row_bytes, m.lane_idx() * 16 + step / 8 * bits_of(kWeight),
              w.length_bytes, w.aligned);
    });
    const auto group = [&]<int kGroup>() {
      F a[kTokens][8];
      unrolled<kTokens>([&](int t) {
        if (t >= tokens) return;
        typename M::template registers<uint32_t, 4> pairs;
        load_16(m, pairs, x[t], (first + 8 * kGroup) * 2, 2 * w.contraction, x_aligned);
        unrolled<8>([&](int j) {
          a[t][j] = j % 2 ? to_float<Input::kBF16, 1>(m, pairs[j / 2]) : to_float<Input::kBF16, 0>(m, pairs[j / 2]);
        });
      });
      unrolled<kRows>([&](int r) {
        F b[8];
        decode_8<kWeight, kGroup>(m, words[r], b);
        unrolled<kTokens>([&](int t) {
          if (t >= tokens) return;
          if (kGroup % kGroupsOfBlock == 0) partial[r][t] = F{};
          unrolled<8>([&](int j) { partial[r][t] = m.fma(a[t][j], b[j], partial[r][t]); });
        });
        if constexpr (kGroup % kGroupsOfBlock == kGroupsOfBlock - 1) {  // the block, or the lane's part of it, ends
          F scale = m.splat(1.0f);
          if constexpr (kWeight != Weight::kBF16) {
            const I block = (first + 8 * kGroup) / kBlock;
            const auto byte = m.template ld_global<uint8_t>(
                w.scales + expert * w.expert_scales + rows[r] * w.row_scales, block, block * kBlock < w.contraction);
            scale = decode_scale<kWeight>(m, m.template cast<uint32_t>(byte));
          }
          unrolled<kTokens>([&](int t) {
            if (t < tokens) sums[r][t] = m.fma(partial[r][t], scale, sums[r][t]);
          });
        }
      });
    };
    [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
      (group.template operator()<kIndex>(), ...);
    }(std::make_integer_sequence<int, kGroups>{});
  }
  unrolled<kRows>([&](int r) {
    const int64_t line = int64_t{expert} * w.outputs + rows[r];
    const float global = w.global ? m.ld_global_uniform(w.global + line) : 1.0f;
    const float bias = w.bias ? m.ld_global_uniform(w.bias + line) : 0.0f;
    unrolled<kTokens>([&](int t) {
      if (t < tokens) sums[r][t] = sum_of_lanes(m, sums[r][t]) * global;
      if (t < tokens && w.bias) sums[r][t] = sums[r][t] + bias;
    });
  });
}

}  // namespace mxmoe::cuda
