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
    const auto part = [&](int line) __attribute__((always_inline)) {
      const uint8_t* p = first + line * stride;
      return kWhole ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                    : _mm_maskz_loadu_epi8(line < num_lines ? bytes : 0, p);
    };
    z[i] = _mm512_zextsi128_si512(part(i));
    z[i] = _mm512_inserti32x4(z[i], part(4 + i), 1);
    z[i] = _mm512_inserti32x4(z[i], part(8 + i), 2);
    z[i] = _mm512_inserti32x4(z[i], part(12 + i), 3);
  }
}

// 32 bytes of each of 16 lines: z[4 p + i] has lines i, 4 + i, in pairs of 128-bit lanes, and 8 + i, 12 + i at p = 1.
template <bool kWhole>
MXMOE_INLINE void load_lane_pairs(const uint8_t* first, int64_t stride, int num_lines, __mmask32 bytes, __m512i z[8]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const auto part = [&](int line) __attribute__((always_inline)) {
      const uint8_t* p = first + line * stride;
      return kWhole ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))
                    : _mm256_maskz_loadu_epi8(line < num_lines ? bytes : 0, p);
    };
    const int line = i / 4 * 8 + i % 4;
    z[i] = _mm512_inserti64x4(_mm512_castsi256_si512(part(line)), part(line + 4), 1);
  }
}

// Both halves turned: z[i] is the first 16 bytes' as load_lanes and the turn would have it, z[4 + i] the last ones'.
MXMOE_INLINE void join_lane_pairs(__m512i z[8]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i low = z[i], high = z[4 + i];
    z[i] = _mm512_shuffle_i32x4(low, high, 0x88), z[4 + i] = _mm512_shuffle_i32x4(low, high, 0xdd);
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

template <typename Mask = __mmask16>
MXMOE_INLINE Mask first_bytes(int n) {
  constexpr int kBytes = 8 * sizeof(Mask);
  return static_cast<Mask>(n >= kBytes ? ~0ull : n <= 0 ? 0 : (1ull << n) - 1);
}

// Decodes parts of a block of 32 elements x 16 lines, with scales of one block each.
template <Element E>
struct PartDecoder;

// It holds 16 block scales of each line, of kGroups groups of 16 lines: block b of group g is block g * kSpan / 32 + b.
template <Element E, int kGroups = 1>
struct TurnedLines;

template <Element E>
constexpr int64_t kSpan = 16 * block_of(E);  // elements that 16 scales cover

// Of 64 scale bytes, those of the lines 16 g .. 16 g + 15 as 16 lanes that hold the byte in both halves.
MXMOE_INLINE __m512i spread_bytes(__m512i x, int g) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index =
      _mm512_add_epi32(_mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16)), _mm512_set1_epi32(16 * g | 16 * g << 16));
  return _mm512_maskz_permutexvar_epi8(0x5555555555555555ull, index, x);
}

// 8-bit elements: to BF16 by table, the scale is added to the exponent.
template <Element E>
  requires(E == Element::kMxE4M3 || E == Element::kMxE5M2)
struct PartDecoder<E> {
  CodeBytes table = code_bytes<E>();

  // A block is 8 parts of 2 steps each.
  static constexpr int kParts = 8, kSteps = 2;
  using Scales = __m512i;

  // Of 64 lines, in groups of 16.
  __attribute__((always_inline)) void spread(__m512i bytes, Scales scales[4]) const {
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g)
      scales[g] = _mm512_add_epi16(_mm512_slli_epi16(spread_bytes(bytes, g), 7), _mm512_set1_epi16(exponent_of(0)));
  }
  __attribute__((always_inline)) void decode(__m512i part, Scales exponents, __m512i steps[2]) const {
    bf16_from_lane_codes(table, part, steps[0], steps[1]);
    for (int s = 0; s < 2; ++s) steps[s] = scale_bf16(steps[s], exponents);
  }
};

template <Element E, int kGroups>
  requires(E == Element::kMxE4M3 || E == Element::kMxE5M2)
struct TurnedLines<E, kGroups> : PartDecoder<E> {
  alignas(64) uint8_t scales[16 * kGroups][16];  // [block][line]

  __attribute__((always_inline)) void set_scales(int group, const __m512i turned[4]) {
    for (int j = 0; j < 4; ++j) _mm512_store_si512(scales[16 * group + 4 * j], turned[j]);
  }

  template <bool kWhole>
  MXMOE_INLINE void load(const uint8_t* first, int64_t stride, int num_lines, int count, __m512i parts[8]) {
    load_lane_pairs<kWhole>(first, stride, num_lines, first_bytes<__mmask32>(count), parts);
    turn_words(parts), turn_words(parts + 4);
    join_lane_pairs(parts);
  }
  __attribute__((always_inline)) __m512i scales_of(int block, int) const {
    return _mm512_add_epi16(in_both_halves(scales[block], 7), _mm512_set1_epi16(exponent_of(0)));
  }
};

// 4-bit elements: one table has magnitude x significand of the scale, its exponents raised to the largest scale's; what
// this scale is lower is subtracted with saturation, which leaves zero alone. Signs come last.
template <Element E>
  requires(is_packed(E))
struct PartDecoder<E> {
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

  // A block is 4 parts of 4 steps each.
  static constexpr int kParts = 4, kSteps = 4;
  struct Scales {
    __m512i significand, lower;
  };

  // Scale bytes as their places in the tables.
  struct Places {
    __m512i significand, below;
  };
  MXMOE_INLINE Places places_of(__m512i bytes) {
    if constexpr (E == Element::kMxE2M1)
      return {_mm512_setzero_si512(), _mm512_sub_epi8(_mm512_set1_epi8(static_cast<char>(127 + kTop)), bytes)};
    const auto look_up = [&](const uint8_t* table) __attribute__((always_inline)) {
      return _mm512_permutex2var_epi8(_mm512_loadu_si512(table), bytes, _mm512_loadu_si512(table + 64));
    };
    return {look_up(kTables.significand), look_up(kTables.below)};
  }

  // Of 64 lines, in groups of 16.
  __attribute__((always_inline)) void spread(__m512i bytes, Scales scales[4]) const {
    const Places places = places_of(bytes);
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      scales[g].lower = _mm512_slli_epi16(spread_bytes(places.below, g), 7);
      scales[g].significand =
          E == Element::kMxE2M1 ? places.significand : _mm512_slli_epi16(spread_bytes(places.significand, g), 3);
    }
  }
  __attribute__((always_inline)) void decode(__m512i part, Scales scale, __m512i steps[4]) const {
    const __m512i low_bits = _mm512_set1_epi16(7), sign_bit = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      // Of each half, the low bits start with a code, and the top bit is the code's sign.
      constexpr auto kBit = [](int t, int code) { return static_cast<int64_t>((8 * t + 4 * code) & 63); };
      constexpr auto kHalf = [](int64_t bit) { return bit | ((bit - 4) & 63) << 8; };
      const int64_t lane = kHalf(kBit(t, 0)) | kHalf(kBit(t, 1)) << 16;
      const int64_t fields = lane | (kHalf(kBit(t, 0) + 32) | kHalf(kBit(t, 1) + 32) << 16) << 32;
      const __m512i codes = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(fields), part);
      const __m512i index =
          _mm512_ternarylogic_epi32(codes, low_bits, scale.significand, 0xea);  // (codes & 7) | significand
      __m512i x = _mm512_subs_epu16(_mm512_permutex2var_epi16(product[0], index, product[1]), scale.lower);
      steps[t] = _mm512_ternarylogic_epi32(x, codes, sign_bit, 0xf8);  // x | (codes & sign)
    }
  }
};

template <Element E, int kGroups>
  requires(is_packed(E))
struct TurnedLines<E, kGroups> : PartDecoder<E> {
  using typename PartDecoder<E>::Scales;
  alignas(64) uint8_t significands[16 * kGroups][16], below[16 * kGroups][16];  // [block][line]

  __attribute__((always_inline)) void set_scales(int group, const __m512i turned[4]) {
    for (int j = 0; j < 4; ++j) {
      const auto places = this->places_of(turned[j]);
      if (E == Element::kNvE2M1) _mm512_store_si512(significands[16 * group + 4 * j], places.significand);
      _mm512_store_si512(below[16 * group + 4 * j], places.below);
    }
  }

  template <bool kWhole>
  MXMOE_INLINE void load(const uint8_t* first, int64_t stride, int num_lines, int count, __m512i parts[4]) {
    load_lanes<kWhole>(first, stride, num_lines, first_bytes((count + 1) / 2), parts);
    turn_dwords(parts);
  }
  __attribute__((always_inline)) Scales scales_of(int block, int part) const {
    constexpr int kBlocks = 32 / block_of(E);
    const int scale = block * kBlocks + part * kBlocks / 4;
    Scales s{_mm512_setzero_si512(), in_both_halves(below[scale], 7)};
    if constexpr (E == Element::kNvE2M1) s.significand = in_both_halves(significands[scale], 3);
    return s;
  }
};

// A block of 32 elements x 16 lines, absent lines and elements from `count` on zero.
template <bool kWhole, Element E, int kGroups>
MXMOE_INLINE void decode_block(const TurnedLines<E, kGroups>& turned, const uint8_t* first, int64_t stride,
                               int num_lines, int count, int block, __m512i steps[16]) {
  using T = TurnedLines<E, kGroups>;
  __m512i parts[T::kParts];
  T::template load<kWhole>(first, stride, num_lines, count, parts);
#pragma GCC unroll 8
  for (int j = 0; j < T::kParts; ++j) turned.decode(parts[j], turned.scales_of(block, j), steps + j * T::kSteps);
}

// Scales of up to 16 lines, for the next kSpan elements or `left`, where there are less.
template <Element E, int kGroups>
MXMOE_INLINE void turn_scales(TurnedLines<E, kGroups>& turned, int group, const uint8_t* first, int64_t stride,
                              int num_lines, int64_t left) {
  const int64_t blocks = (left + block_of(E) - 1) / block_of(E);
  __m512i z[4];
  load_lanes<false>(first, stride, num_lines, first_bytes(static_cast<int>(blocks < 16 ? blocks : 16)), z);
  turn_bytes(z);
  turned.set_scales(group, z);
}

// Panel from quantized lines whose contraction is contiguous, 16 lines at a time.
template <Element E>
static void pack_turned_lines(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t k0,
                              int64_t n, uint32_t* out, Ahead& ahead) {
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
      if (k % kSpan<E> == 0) turn_scales(turned, 0, scales + k / block_of(E), f.scale_stride, present, n - k);
      const uint8_t* block = at<E>(values, f.k_stride, k0 + k);
      const int index = static_cast<int>(k % kSpan<E> / 32);
      __m512i steps[16];
      if (present == 16 && n - k >= 32) {
        ahead.fetch(kFetch);
        decode_block<true>(turned, block, f.line_stride, 16, 32, index, steps);
#pragma GCC unroll 16
        for (int s = 0; s < 16; ++s) _mm512_store_si512(to + s * kPanel, steps[s]);
      } else {
        const int count = static_cast<int>(n - k < 32 ? n - k : 32);
        decode_block<false>(turned, block, f.line_stride, present, count, index, steps);
        for (int s = 0; s < (count + 1) / 2; ++s) _mm512_store_si512(to + s * kPanel, steps[s]);
      }
    }
  }
}

// A panel (layout.h) as it is read, from start to end, some KiB ahead: multiply(step, vectors of the 4 groups of 16
// lines), steps ascending, and see(scale bytes of a block).
template <Element E, class Multiply, class See>
__attribute__((always_inline)) static inline void read_panel(const uint8_t* values, const uint8_t* scales,
                                                             int64_t contraction, Multiply&& multiply, See&& see) {
  using Decoder = PartDecoder<E>;
  constexpr int kGroups = kPanel / 16, kSteps = Decoder::kSteps, kParts = Decoder::kParts * block_of(E) / 32;
  constexpr int64_t kAhead = 4096, kScalesAhead = 1024;
  const Decoder decoder;
  int64_t step = 0;
  for (int64_t k = 0; k < contraction; k += block_of(E), scales += kPanel) {
    typename Decoder::Scales scale[kGroups];
    const __m512i bytes = _mm512_loadu_si512(scales);
    prefetch_past(scales, kScalesAhead);
    see(bytes);
    decoder.spread(bytes, scale);
#pragma GCC unroll 8
    for (int j = 0; j < kParts; ++j, values += 64 * kGroups, step += kSteps) {
      __m512i steps[kGroups][kSteps];
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        prefetch_past(values + 64 * g, kAhead);
        decoder.decode(_mm512_loadu_si512(values + 64 * g), scale[g], steps[g]);
      }
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
        const __m512i b[kGroups] = {steps[0][s], steps[1][s], steps[2][s], steps[3][s]};
        multiply(step + s, b);
      }
    }
  }
}

// Panel of steps from one in memory.
template <Element E>
static void pack_from_panel(const LineFormat& f, const Lines& lines, int64_t line0, int64_t k0, int64_t n,
                            uint32_t* out) {
  const auto store = [&](int64_t step, const __m512i* b) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int g = 0; g < kPanel / 16; ++g) _mm512_store_si512(out + step * kPanel + 16 * g, b[g]);
  };
  read_panel<E>(lines.values + line0 * f.line_stride + panel_offset(0, k0, is_packed(E) ? 4 : 8),
                lines.scales + line0 * f.scale_stride + panel_scale_offset(0, k0 / block_of(E)), n, store,
                [](__m512i) {});
}

}  // namespace mxmoe::host::MXMOE_ISA
#endif
