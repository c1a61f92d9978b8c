// Elements and scales of every operand format -> FP32, and on AVX-512 -> BF16 where that is exact.
#pragma once
#include "host/grouped_mm.h"
#include "host/simd.h"

namespace mxmoe::host::MXMOE_ISA {

constexpr int kPanel = kPanelLines;

// Memory that will be read soon, fetched into L2 in the order of its addresses while other work goes on.
struct Ahead {
  const uint8_t *next = nullptr, *end = nullptr;
  int64_t pace = 64;  // bytes of it for each step of a product

  // Evenly over so many steps: fetched faster than memory delivers, it keeps the product's own loads waiting.
  void spread(int64_t steps) { pace = end - next < 64 * steps ? (end - next) / steps + 1 : 64; }

  __attribute__((always_inline)) void fetch(int lines) {
    if (next >= end) return;
    for (int i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// Memory that a stream reaches later; it may end before.
MXMOE_INLINE void prefetch_past(const uint8_t* p, int64_t bytes) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p) + bytes));
}

struct CodeTables {
  float e4m3[256]{}, e5m2[256]{}, e2m1[16]{};
};

constexpr float power_of_two(int n) {
  float y = 1;
  for (; n > 0; --n) y *= 2;
  for (; n < 0; ++n) y /= 2;
  return y;
}

constexpr float minifloat(int code, int mantissa_bits, int bias) {  // magnitude, finite
  int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
  if (exponent == 0) return static_cast<float>(mantissa) * power_of_two(1 - bias - mantissa_bits);
  return static_cast<float>(mantissa + (1 << mantissa_bits)) * power_of_two(exponent - bias - mantissa_bits);
}

constexpr CodeTables make_code_tables() {
  CodeTables t;
  for (int c = 0; c < 128; ++c) {
    t.e4m3[c] = c == 127 ? __builtin_nanf("") : minifloat(c, 3, 7);
    t.e5m2[c] = c > 124 ? __builtin_nanf("") : c == 124 ? __builtin_inff() : minifloat(c, 2, 15);
    t.e4m3[c + 128] = -t.e4m3[c], t.e5m2[c + 128] = -t.e5m2[c];
  }
  for (int c = 0; c < 8; ++c) t.e2m1[c] = minifloat(c, 1, 1), t.e2m1[c + 8] = -t.e2m1[c];
  return t;
}
static constexpr CodeTables kCodes = make_code_tables();

constexpr bool is_mx(Element e) {
  return e == Element::kMxE4M3 || e == Element::kMxE5M2 || e == Element::kMxE2M1;
}
constexpr bool is_packed(Element e) {
  return e == Element::kMxE2M1 || e == Element::kNvE2M1;
}
constexpr bool is_scaled(Element e) {
  return is_mx(e) || e == Element::kNvE2M1;
}
constexpr int block_of(Element e) {
  return e == Element::kNvE2M1 ? 16 : 32;
}

// Address of element k of a line: packed values have two per byte.
template <Element E>
MXMOE_INLINE const uint8_t* at(const uint8_t* line, int64_t k_stride, int64_t k) {
  return is_packed(E) ? line + (k >> 1) : line + k * k_stride;
}

template <Element E>
MXMOE_INLINE float element_f32(const uint8_t* p, int64_t k) {  // p = at(line, k)
  if constexpr (E == Element::kF32) {
    float x;
    memcpy(&x, p, 4);
    return x;
  } else if constexpr (E == Element::kBF16 || E == Element::kF16) {
    uint16_t x;
    memcpy(&x, p, 2);
    return E == Element::kBF16 ? f32_of_bf16(x) : f32_of_f16(x);
  } else if constexpr (is_packed(E)) {
    return kCodes.e2m1[k & 1 ? *p >> 4 : *p & 15];
  } else {
    return E == Element::kMxE4M3 ? kCodes.e4m3[*p] : kCodes.e5m2[*p];
  }
}

template <Element E>
MXMOE_INLINE float scale_f32(uint8_t s) {
  if constexpr (E == Element::kNvE2M1) return kCodes.e4m3[s];
  return s == 255 ? f32_of(0x7fc00000u) : s == 0 ? f32_of(0x00400000u) : f32_of(uint32_t{s} << 23);
}

// Bytes of element k of a line, and of its block scale.
template <Element E>
MXMOE_INLINE const uint8_t* value_at(const LineFormat& f, const Lines& lines, int64_t line, int64_t k) {
  if (!f.panels) return at<E>(lines.values + line * f.line_stride, f.k_stride, k);
  const uint8_t* panel = lines.values + line / kPanel * kPanel * f.line_stride;
  return panel + panel_offset(line % kPanel, k, is_packed(E) ? 4 : 8);
}
template <Element E>
MXMOE_INLINE const uint8_t* scale_at(const LineFormat& f, const Lines& lines, int64_t line, int64_t block) {
  if (!f.panels) return lines.scales + line * f.scale_stride + block;
  return lines.scales + line / kPanel * kPanel * f.scale_stride + panel_scale_offset(line % kPanel, block);
}

// n elements of one line from k on, with their block scales.
template <Element E>
static void decode_f32(const LineFormat& f, const Lines& lines, int64_t line, int64_t k, int64_t n, float* out) {
  const uint8_t* values = lines.values + line * f.line_stride;
  if constexpr (!is_scaled(E)) {
    constexpr int64_t kBytes = E == Element::kF32 ? 4 : 2;
    const int64_t stride = f.k_stride;
    if (stride == kBytes) {  // known when compiled: in vectors
      for (int64_t i = k; i < k + n; ++i) *out++ = element_f32<E>(values + i * kBytes, i);
    } else {
      for (int64_t i = k; i < k + n; ++i) *out++ = element_f32<E>(values + i * stride, i);
    }
  } else {
    constexpr int kBlock = block_of(E);
    for (int64_t i = k, end; i < k + n; i = end) {
      const float scale = scale_f32<E>(*scale_at<E>(f, lines, line, i / kBlock));
      end = (i / kBlock + 1) * kBlock;
      if (end > k + n) end = k + n;
      for (; i < end; ++i) *out++ = element_f32<E>(value_at<E>(f, lines, line, i), i) * scale;
    }
  }
}

// Calls body.operator()<E>() for the operand's element.
template <typename Body>
MXMOE_INLINE void for_element(Element e, Body&& body) {
  switch (e) {
    case Element::kF32:
      return body.template operator()<Element::kF32>();
    case Element::kBF16:
      return body.template operator()<Element::kBF16>();
    case Element::kF16:
      return body.template operator()<Element::kF16>();
    case Element::kMxE4M3:
      return body.template operator()<Element::kMxE4M3>();
    case Element::kMxE5M2:
      return body.template operator()<Element::kMxE5M2>();
    case Element::kMxE2M1:
      return body.template operator()<Element::kMxE2M1>();
    case Element::kNvE2M1:
      return body.template operator()<Element::kNvE2M1>();
  }
}

// The same for those that are exact in BF16 with most scales.
template <typename Body>
MXMOE_INLINE void for_pair_element(Element e, Body&& body) {
  for_element(e, [&]<Element E>() {
    if constexpr (E != Element::kF32 && E != Element::kF16) body.template operator()<E>();
  });
}

#if defined(MXMOE_ISA_AVX512)

// Scale bytes with which every element is a normal BF16 number (or zero, Inf, NaN).
struct ScaleRange {
  uint8_t low, high;
};
template <Element E>
constexpr ScaleRange exact_scales() {
  if (E == Element::kMxE4M3) return {10, 246};
  if (E == Element::kMxE5M2) return {17, 239};
  if (E == Element::kMxE2M1) return {2, 252};
  return {0, 126};  // NVFP4: neither negative nor NaN
}

template <Element E>
static bool block_is_zero(const LineFormat& f, const Lines& lines, int64_t line, int64_t k, int64_t n) {
  constexpr int kStep = is_packed(E) ? 2 : 1;
  uint8_t any = 0;
  for (int64_t i = 0; i < n; i += kStep) any |= *value_at<E>(f, lines, line, k + i) & (is_packed(E) ? 0x77 : 0x7f);
  return any == 0;
}

static bool all_within(const uint8_t* scales, int64_t n, ScaleRange range) {
  uint8_t furthest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t above = static_cast<uint8_t>(scales[i] - range.low);
    furthest = above > furthest ? above : furthest;
  }
  return furthest <= range.high - range.low;
}

// Whether one of the lines must take the FP32 path: a block with a scale outside the exact range and an element that is
// not zero.
template <Element E>
static bool is_wide(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t contraction) {
  if constexpr (is_scaled(E)) {
    constexpr ScaleRange kExact = exact_scales<E>();
    const uint8_t* scales = lines.scales + line0 * f.scale_stride;
    constexpr int kBlock = block_of(E);
    const int64_t blocks = (contraction + kBlock - 1) / kBlock;
    const bool dense = f.scale_stride == blocks;
    if (dense && all_within(scales, blocks * num_lines, kExact)) return false;
    for (int64_t line = line0; line < line0 + num_lines; ++line, scales += f.scale_stride) {
      if (!f.panels && all_within(scales, blocks, kExact)) continue;
      for (int64_t i = 0; i < blocks; ++i) {
        const uint8_t* scale = scale_at<E>(f, lines, line, i);
        if (all_within(scale, 1, kExact)) continue;
        const int64_t k = i * kBlock, n = contraction - k < kBlock ? contraction - k : kBlock;
        if ((*scale | (is_mx(E) ? 0 : 128)) == 255 || !block_is_zero<E>(f, lines, line, k, n)) return true;
      }
    }
  }
  return false;
}

// BF16 bit patterns of the 128 magnitudes of an 8-bit format, as low and high bytes, in registers. They have four
// significant bits at most: the lowest bit marks those that a scale applies to, all but zero, Inf and NaN.
struct CodeBytes {
  __m512i low[2], high[2];
};

template <Element E>
MXMOE_INLINE CodeBytes code_bytes() {
  struct Bytes {
    uint8_t low[128], high[128];
  };
  static constexpr Bytes kBytes = [] {
    Bytes b{};
    for (int c = 0; c < 128; ++c) {
      uint32_t word = __builtin_bit_cast(uint32_t, E == Element::kMxE5M2 ? kCodes.e5m2[c] : kCodes.e4m3[c]) >> 16;
      const bool scalable = word != 0 && word < 0x7f80;
      b.low[c] = (word & 255) | scalable, b.high[c] = word >> 8;
    }
    return b;
  }();
  CodeBytes t;
  for (int i = 0; i < 2; ++i) {
    t.low[i] = _mm512_loadu_si512(kBytes.low + 64 * i);
    t.high[i] = _mm512_loadu_si512(kBytes.high + 64 * i);
  }
  return t;
}

// 64 codes -> BF16: of each 128-bit lane the lower 8 codes in `first`, the upper 8 in `second`.
MXMOE_INLINE void bf16_from_lane_codes(const CodeBytes& t, __m512i codes, __m512i& first, __m512i& second) {
  const __m512i magnitude_bits = _mm512_set1_epi8(0x7f);
  __m512i low = _mm512_permutex2var_epi8(t.low[0], codes, t.low[1]);  // the index is the low 7 bits
  __m512i high = _mm512_permutex2var_epi8(t.high[0], codes, t.high[1]);
  high = _mm512_ternarylogic_epi64(high, codes, magnitude_bits, 0xf4);  // high | (codes & ~magnitude_bits)
  first = _mm512_unpacklo_epi8(low, high);
  second = _mm512_unpackhi_epi8(low, high);
}

// 64 codes -> BF16: codes 0..31 in `first`, 32..63 in `second`.
MXMOE_INLINE void bf16_from_codes(const CodeBytes& t, __m512i codes, __m512i& first, __m512i& second) {
  bf16_from_lane_codes(t, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes), first, second);
}

// Times 2^(s - 127) where marked, without the mark; `exponent`: what kExponents has for s.
MXMOE_INLINE __m512i scale_bf16(__m512i x, __m512i exponent) {
  return _mm512_mask_add_epi16(x, _mm512_test_epi16_mask(x, _mm512_set1_epi16(1)), x, exponent);
}
constexpr int16_t exponent_of(int s) {
  return static_cast<int16_t>((s - 127) * 128 - 1);
}
// What scale byte s adds, from a table so that broadcasting it is one load.
struct ExponentTable {
  int16_t of[256]{};
};
static constexpr ExponentTable kExponents = [] {
  ExponentTable t;
  for (int s = 0; s < 256; ++s) t.of[s] = exponent_of(s);
  return t;
}();

#endif

}  // namespace mxmoe::host::MXMOE_ISA
