// Quantized lines as panel steps on AVX-512: 16 lines are turned while they are codes, a quarter or half of the bytes
// that they decode to, then decoded with one line per 32-bit lane, so that their scales are vectors.
#pragma once
#include "host/gemm/decode.h"

#if defined(MXMOE_ISA_AVX512)
namespace mxmoe::host::MXMOE_ISA {

// 16 bytes of each of 16 lines: z[i] has lines i, 4 + i, 8 + i, 12 + i in its 128-bit lanes. Absent lines, and bytes
// outside `bytes`, are zero.
template <bool kWhole>
MXMOE_INLINE void load_lanes(const uint8_t* first, int64_t stride, int num_lines, __mmask16 bytes, __m512i z[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    z[i] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const int line = 4 * g + i;
      const uint8_t* p = first + line * stride;
      const __m128i part = kWhole ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                                  : _mm_maskz_loadu_epi8(line < num_lines ? bytes : 0, p);
      z[i] = _mm512_mask_broadcast_i32x4(z[i], static_cast<__mmask16>(0xf << 4 * g), part);
    }
  }
}

// z as loaded; step 2 j of 4 lines, then step 2 j + 1 in each 128-bit lane of z[j], where a step is 16 bits.
MXMOE_INLINE void turn_words(__m512i z[4]) {
  __m512i a = _mm512_unpacklo_epi16(z[0], z[1]), b = _mm512_unpacklo_epi16(z[2], z[3]);
  __m512i c = _mm512_unpackhi_epi16(z[0], z[1]), d = _mm512_unpackhi_epi16(z[2], z[3]);
  z[0] = _mm512_unpacklo_epi32(a, b), z[1] = _mm512_unpackhi_epi32(a, b);
  z[2] = _mm512_unpacklo_epi32(c, d), z[3] = _mm512_unpackhi_epi32(c, d);
}

// The same of 32 bits: z[j] has those of step j, lines in order.
MXMOE_INLINE void turn_dwords(__m512i z[4]) {
  __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpacklo_epi32(z[2], z[3]);
  __m512i c = _mm512_unpackhi_epi32(z[0], z[1]), d = _mm512_unpackhi_epi32(z[2], z[3]);
  z[0] = _mm512_unpacklo_epi64(a, b), z[1] = _mm512_unpackhi_epi64(a, b);
  z[2] = _mm512_unpacklo_epi64(c, d), z[3] = _mm512_unpackhi_epi64(c, d);
}

// The same of 8 bits: z[j] has those of steps 4 j .. 4 j + 3, 16 bytes each, lines in order.
MXMOE_INLINE void turn_bytes(__m512i z[4]) {
  __m512i a = _mm512_unpacklo_epi8(z[0], z[1]), b = _mm512_unpacklo_epi8(z[2], z[3]);
  __m512i c = _mm512_unpackhi_epi8(z[0], z[1]), d = _mm512_unpackhi_epi8(z[2], z[3]);
  z[0] = _mm512_unpacklo_epi16(a, b), z[1] = _mm512_unpackhi_epi16(a, b);
  z[2] = _mm512_unpacklo_epi16(c, d), z[3] = _mm512_unpackhi_epi16(c, d);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int j = 0; j < 4; ++j) z[j] = _mm512_permutexvar_epi32(order, z[j]);
}

// 16 bytes as 16 lanes that hold the value in both halves.
MXMOE_INLINE __m512i in_both_halves(const uint8_t* p, int shift) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_or_si512(_mm512_slli_epi32(x, shift), _mm512_slli_epi32(x, 16 + shift));
}

MXMOE_INLINE __mmask16 first_bytes(int n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1);
}

// Decodes blocks of 32 elements x 16 lines; it holds the scales of 16 scale blocks of the lines.
template <Element E>
struct TurnedLines;

// 8-bit elements: to BF16 by table, the scale is added to the exponent.
template <Element E>
  requires(E == Element::kMxE4M3 || E == Element::kMxE5M2)
struct TurnedLines<E> {
  CodeBytes table = code_bytes<E>();
  alignas(64) uint8_t scales[16][16];  // [block][line]

  __attribute__((always_inline)) void set_scales(const __m512i turned[4]) {
    for (int j = 0; j < 4; ++j) _mm512_store_si512(scales[4 * j], turned[j]);
  }

  template <bool kWhole>
  __attribute__((always_inline)) void decode(const uint8_t* first, int64_t stride, int num_lines, int count, int block,
                                             __m512i steps[16]) const {
    const __m512i exponents =
        _mm512_sub_epi16(in_both_halves(scales[block], 7), _mm512_set1_epi16(static_cast<int16_t>(127 << 7)));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m512i z[4];
      load_lanes<kWhole>(first + 16 * half, stride, num_lines, first_bytes(count - 16 * half), z);
      turn_words(z);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        __m512i* step = steps + 8 * half + 2 * j;
        bf16_from_lane_codes(table, z[j], step[0], step[1]);
        for (int s = 0; s < 2; ++s) step[s] = scale_bf16(step[s], exponents);
      }
    }
  }
};

// 4-bit elements: one table has magnitude x significand of the scale, its exponents raised to the largest scale's; what
// this scale is lower is subtracted with saturation, which leaves zero alone. Signs come last.
template <Element E>
  requires(is_packed(E))
struct TurnedLines<E> {
  static constexpr int kTop = E == Element::kNvE2M1 ? 8 : 125;  // exponent of the largest scale
  struct Tables {
    uint16_t product[64]{};                    // [significand of the scale][magnitude]
    uint8_t significand[128]{}, below[128]{};  // of an E4M3 scale: its place above, exponents under kTop; 255: zero
  };
  static constexpr Tables kTables = [] {
    Tables t;
    for (int i = 1; i < 64; ++i) {
      const float product = kCodes.e2m1[i & 7] * (1.0f + static_cast<float>(i >> 3) / 8);
      if (product != 0)
        t.product[i] = static_cast<uint16_t>((__builtin_bit_cast(uint32_t, product) >> 16) + kTop * 128);
    }
    t.below[0] = 255;
    for (int s = 1; s < 127; ++s) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, kCodes.e4m3[s]);
      t.significand[s] = static_cast<uint8_t>(bits >> 20 & 7);
      t.below[s] = static_cast<uint8_t>(kTop + 127 - static_cast<int>(bits >> 23));
    }
    return t;
  }();
  __m512i product[2] = {_mm512_loadu_si512(kTables.product), _mm512_loadu_si512(kTables.product + 32)};
  alignas(64) uint8_t significands[16][16], below[16][16];  // [block][line]

  __attribute__((always_inline)) void set_scales(const __m512i turned[4]) {
    for (int j = 0; j < 4; ++j) {
      if constexpr (E == Element::kNvE2M1) {
        const auto look_up = [&](const uint8_t* table) {
          return _mm512_permutex2var_epi8(_mm512_loadu_si512(table), turned[j], _mm512_loadu_si512(table + 64));
        };
        _mm512_store_si512(significands[4 * j], look_up(kTables.significand));
        _mm512_store_si512(below[4 * j], look_up(kTables.below));
      } else {
        _mm512_store_si512(below[4 * j], _mm512_sub_epi8(_mm512_set1_epi8(static_cast<char>(127 + kTop)), turned[j]));
      }
    }
  }

  template <bool kWhole>
  __attribute__((always_inline)) void decode(const uint8_t* first, int64_t stride, int num_lines, int count, int block,
                                             __m512i steps[16]) const {
    constexpr int kBlocks = 32 / block_of(E);
    __m512i z[4];
    load_lanes<kWhole>(first, stride, num_lines, first_bytes((count + 1) / 2), z);
    turn_dwords(z);
    const __m512i low_bits = _mm512_set1_epi16(7), sign_bit = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int scale = block * kBlocks + j * kBlocks / 4;
      __m512i significand = _mm512_setzero_si512();
      if constexpr (E == Element::kNvE2M1) significand = in_both_halves(significands[scale], 3);
      const __m512i lower = in_both_halves(below[scale], 7);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        // Of each half, the low bits start with a code, and the top bit is the code's sign.
        constexpr auto kBit = [](int t, int code) { return static_cast<int64_t>((8 * t + 4 * code) & 63); };
        constexpr auto kHalf = [](int64_t bit) { return bit | ((bit - 4) & 63) << 8; };
        const int64_t lane = kHalf(kBit(t, 0)) | kHalf(kBit(t, 1)) << 16;
        const int64_t fields = lane | (kHalf(kBit(t, 0) + 32) | kHalf(kBit(t, 1) + 32) << 16) << 32;
        const __m512i codes = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(fields), z[j]);
        const __m512i index =
            _mm512_ternarylogic_epi32(codes, low_bits, significand, 0xea);  // (codes & 7) | significand
        __m512i x = _mm512_subs_epu16(_mm512_permutex2var_epi16(product[0], index, product[1]), lower);
        steps[4 * j + t] = _mm512_ternarylogic_epi32(x, codes, sign_bit, 0xf8);  // x | (codes & sign)
      }
    }
  }
};

// Panel from quantized lines whose contraction is contiguous, 16 lines at a time.
template <Element E>
static void pack_turned_lines(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t k0,
                              int64_t n, uint32_t* out, Ahead& ahead) {
  constexpr int64_t kSpan = 16 * block_of(E);   // elements that 16 scales cover
  constexpr int kFetch = is_packed(E) ? 4 : 8;  // cache lines of such a block
  TurnedLines<E> turned;
  for (int first = 0; first < kPanel; first += 16, out += 16) {
    const int present = num_lines - first < 16 ? num_lines - first : 16;
    if (present <= 0) {
      for (int64_t s = 0; s < (n + 1) / 2; ++s) _mm512_store_si512(out + s * kPanel, _mm512_setzero_si512());
      continue;
    }
    const uint8_t* values = lines.values + (line0 + first) * f.line_stride;
    const uint8_t* scales = lines.scales + (line0 + first) * f.scale_stride + k0 / block_of(E);
    uint32_t* to = out;
    for (int64_t k = 0; k < n; k += 32, to += 16 * kPanel) {
      if (k % kSpan == 0) {
        const int64_t blocks = (n - k + block_of(E) - 1) / block_of(E);
        __m512i z[4];
        load_lanes<false>(scales + k / block_of(E), f.scale_stride, present,
                          first_bytes(static_cast<int>(blocks < 16 ? blocks : 16)), z);
        turn_bytes(z);
        turned.set_scales(z);
      }
      const uint8_t* block = at<E>(values, f.k_stride, k0 + k);
      const int index = static_cast<int>(k % kSpan / 32);
      __m512i steps[16];
      if (present == 16 && n - k >= 32) {
        ahead.fetch(kFetch);
        turned.template decode<true>(block, f.line_stride, 16, 32, index, steps);
#pragma GCC unroll 16
        for (int s = 0; s < 16; ++s) _mm512_store_si512(to + s * kPanel, steps[s]);
      } else {
        const int count = static_cast<int>(n - k < 32 ? n - k : 32);
        turned.template decode<false>(block, f.line_stride, present, count, index, steps);
        for (int s = 0; s < (count + 1) / 2; ++s) _mm512_store_si512(to + s * kPanel, steps[s]);
      }
    }
  }
}

}  // namespace mxmoe::host::MXMOE_ISA
#endif
