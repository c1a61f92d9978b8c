// Tiles of a few rows on AVX-512: B's lines are turned, decoded and multiplied in registers, as BF16 pairs.
#pragma once
#include "host/gemm/few_rows.h"

#if defined(MXMOE_ISA_AVX512)
namespace mxmoe::host::MXMOE_ISA {

// Groups of 16 lines that take turns, so that few sums are not always waiting for themselves. BF16 leaves time for it.
template <Element E, int R>
constexpr int kTileGroups = E == Element::kBF16 || (R > 2 && !is_packed(E)) ? 1 : 2;

// Blocks of 32 elements of B's lines, decoded and given to multiply(step, vectors of the groups), steps ascending.
template <Element E, int kGroups>
struct Turner : TurnedLines<E, kGroups> {
  template <bool kWhole, class F>
  __attribute__((always_inline)) void block(const LineFormat& f, const uint8_t* first, int num_lines, int count,
                                            int block, F&& multiply) const {
    using Turned = TurnedLines<E, kGroups>;
    constexpr int kParts = Turned::kParts, kSteps = Turned::kSteps, kBlocks = static_cast<int>(kSpan<E> / 32);
    __m512i parts[kGroups][kParts];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g)
      Turned::template load<kWhole>(first + 16 * g * f.line_stride, f.line_stride, num_lines - 16 * g, count, parts[g]);
#pragma GCC unroll 8
    for (int j = 0; j < kParts; ++j) {
      __m512i steps[kGroups][kSteps];
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) this->decode(parts[g][j], this->scales_of(g * kBlocks + block, j), steps[g]);
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
        __m512i b[kGroups];
        for (int g = 0; g < kGroups; ++g) b[g] = steps[g][s];
        multiply(j * kSteps + s, b);
      }
    }
  }
};

template <int kGroups>
struct Turner<Element::kBF16, kGroups> {
  static_assert(kGroups == 1);
  template <bool kWhole, class F>
  __attribute__((always_inline)) void block(const LineFormat& f, const uint8_t* first, int num_lines, int count, int,
                                            F&& multiply) const {
    const __mmask32 valid = first_bytes<__mmask32>(count);
    __m512i steps[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const uint8_t* line = first + i * f.line_stride;
      steps[i] = kWhole ? _mm512_loadu_si512(line) : _mm512_maskz_loadu_epi16(i < num_lines ? valid : 0, line);
    }
    transpose16(steps);
#pragma GCC unroll 16
    for (int s = 0; s < 16; ++s) multiply(s, steps + s);
  }
};

// R rows of A times a tile of B's lines: 16 outputs of each group at sums + 16 g, rows kPanel apart.
template <Element E, int R>
__attribute__((noinline)) static void multiply_lines(const LineFormat& f, const Lines& lines, int64_t line0,
                                                     int num_lines, int64_t contraction, const uint32_t* const* rows,
                                                     float* sums, Fetch& ahead) {
  constexpr int kGroups = kTileGroups<E, R>;
  constexpr int kFetch = kGroups * (is_packed(E) ? 4 : E == Element::kBF16 ? 16 : 8);  // cache lines of 32 elements
  // Measured on Zen 5: of the read bandwidth, BF16 0.77 in bursts, 0.85 line by line between the products; MXFP8 0.78,
  // 0.73; NVFP4 0.63, 0.57.
  constexpr bool kBurst = E != Element::kBF16;
  const uint8_t* values = lines.values + line0 * f.line_stride;
  const uint8_t* scales = lines.scales + line0 * f.scale_stride;
  Turner<E, kGroups> turner;
  __m512 sum[R][kGroups];
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < kGroups; ++g) sum[r][g] = _mm512_setzero_ps();

  const auto block = [&]<bool kWhole>(int64_t k, int count) __attribute__((always_inline)) {
    int index = 0;
    if constexpr (is_scaled(E)) {
      index = static_cast<int>(k % kSpan<E> / 32);
      if (index == 0) {
        ahead.scales.fetch(4 * kGroups);
        for (int g = 0; g < kGroups; ++g)
          turn_scales(turner, g, scales + 16 * g * f.scale_stride + k / block_of(E), f.scale_stride, num_lines - 16 * g,
                      contraction - k);
      }
    }
    if (kBurst) ahead.values.fetch(kFetch);
    const bool fetch = !kBurst && ahead.values.next < ahead.values.end;
    const uint8_t* const line = fetch ? ahead.values.next : values;
    const int64_t line_bytes = fetch ? 64 : 0;
    if (fetch) ahead.values.next += 64 * kFetch;
    const uint32_t* words[R];
    for (int r = 0; r < R; ++r) words[r] = rows[r] + k / 2;
    const auto multiply = [&](int s, const __m512i* b) __attribute__((always_inline)) {
      if (!kWhole && 2 * s >= count) return;
      if (!kBurst) __builtin_prefetch(line + s * line_bytes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512i a = _mm512_set1_epi32(static_cast<int>(words[r][s]));
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) sum[r][g] = _mm512_dpbf16_ps(sum[r][g], (__m512bh)a, (__m512bh)b[g]);
      }
    };
    turner.template block<kWhole>(f, at<E>(values, f.k_stride, k), num_lines, count, index, multiply);
  };
  const int64_t whole = num_lines >= 16 * kGroups ? contraction / 32 * 32 : 0;
  for (int64_t k = 0; k < whole; k += 32) block.template operator()<true>(k, 32);
  for (int64_t k = whole; k < contraction; k += 32)
    block.template operator()<false>(k, static_cast<int>(smaller(32, contraction - k)));
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < kGroups; ++g) _mm512_storeu_ps(sums + r * kPanel + 16 * g, sum[r][g]);
}

// R rows of A times a panel in memory; false where a scale lies outside the exact range.
template <Element E, int R>
__attribute__((noinline)) static bool multiply_panel(const LineFormat& f, const Lines& lines, int64_t line0,
                                                     int64_t contraction, const uint32_t* const* rows, float* sums) {
  constexpr int kGroups = kPanel / 16;
  constexpr ScaleRange kExact = exact_scales<E>();
  const __m512i lowest = _mm512_set1_epi8(static_cast<char>(kExact.low));
  __m512i furthest = _mm512_setzero_si512();
  __m512 sum[R][kGroups];
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < kGroups; ++g) sum[r][g] = _mm512_setzero_ps();
  const auto multiply = [&](int64_t step, const __m512i* b) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512i a = _mm512_set1_epi32(static_cast<int>(rows[r][step]));
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) sum[r][g] = _mm512_dpbf16_ps(sum[r][g], (__m512bh)a, (__m512bh)b[g]);
    }
  };
  read_panel<E>(lines.values + line0 * f.line_stride, lines.scales + line0 * f.scale_stride, contraction, multiply,
                [&](__m512i bytes) __attribute__((always_inline)) {
                  furthest = _mm512_max_epu8(furthest, _mm512_sub_epi8(bytes, lowest));
                });
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < kGroups; ++g) _mm512_storeu_ps(sums + r * kPanel + 16 * g, sum[r][g]);
  return !_mm512_cmpgt_epu8_mask(furthest, _mm512_set1_epi8(static_cast<char>(kExact.high - kExact.low)));
}

template <Element E>
struct FewPairs {
  using Step = PairStep;

  // Lines that are multiplied with so many rows at once.
  static int tile(const LineFormat& f, int num_rows) {
    if (f.panels) return kPanel;
    return 16 * (num_rows == 1 ? kTileGroups<E, 1> : num_rows == 2 ? kTileGroups<E, 2> : kTileGroups<E, 4>);
  }

  // False where a scale may lie outside the exact range: the sums are none then.
  template <int R>
  static bool multiply(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t contraction,
                       const uint32_t* const* rows, float* sums, Fetch& ahead) {
    if constexpr (is_scaled(E)) {
      if (f.panels) return multiply_panel<E, R>(f, lines, line0, contraction, rows, sums);
    }
    multiply_lines<E, R>(f, lines, line0, num_lines, contraction, rows, sums, ahead);
    return true;
  }
};

}  // namespace mxmoe::host::MXMOE_ISA
#endif
