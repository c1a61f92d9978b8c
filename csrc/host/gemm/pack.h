// Packed operands. A step is one 32-bit word of the contraction: an FP32 value, or a pair of BF16 values.
//   panel: [steps][64 lines] words, zero for absent lines; both operands where lines are neighbours in memory, B
//   always. rows:  [lines][steps] words; A where the contraction is contiguous.
#pragma once
#include "host/gemm/lines.h"

namespace mxmoe::host::MXMOE_ISA {
#if defined(MXMOE_ISA_AVX512)

// Rows r[i] of 16 words each become columns.
MXMOE_INLINE void transpose16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    __m512i even0 = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), even1 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    __m512i odd0 = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd), odd1 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(even0, even1, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
    t[4 + j] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// BF16 panel from BF16 lines whose contraction is contiguous, 16 lines at a time.
static void pack_bf16_lines(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t k0,
                            int64_t n, uint32_t* out, Ahead& ahead) {
  for (int first = 0; first < kPanel; first += 16, out += 16) {
    const int present = num_lines - first < 16 ? num_lines - first : 16;
    const uint8_t* values = lines.values + (line0 + first) * f.line_stride + k0 * f.k_stride;
    uint32_t* to = out;
    for (int64_t k = 0; k < n; k += 32, to += 16 * kPanel, values += 64) {
      const int64_t count = n - k < 32 ? n - k : 32;
      const __mmask32 valid = count == 32 ? ~0u : (1u << count) - 1;
      ahead.fetch(16);
      __m512i words[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        words[i] = _mm512_maskz_loadu_epi16(i < present ? valid : 0, values + i * f.line_stride);
      }
      transpose16(words);
#pragma GCC unroll 16
      for (int s = 0; s < 16; ++s)
        if (s < (count + 1) / 2) _mm512_store_si512(to + s * kPanel, words[s]);
    }
  }
}

// The 64 neighbouring lines of one k as BF16.
template <Element E>
MXMOE_INLINE void decode_bf16_lines(const CodeBytes& table, const uint8_t* values, __mmask64 valid,
                                    const __m512i exponents[2], __m512i out[2]) {
  if constexpr (E == Element::kBF16) {
    out[0] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(valid), values);
    out[1] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(valid >> 32), values + 64);
  } else {
    bf16_from_codes(table, _mm512_maskz_loadu_epi8(valid, values), out[0], out[1]);
    for (int i = 0; i < 2; ++i) out[i] = scale_bf16(out[i], exponents[i]);
  }
}

// BF16 panel from lines that are neighbours in memory: decode two k, interleave.
template <Element E>
static void pack_pairs_from_columns(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t k0,
                                    int64_t n, uint32_t* out) {
  const CodeBytes table = code_bytes<E>();
  const __mmask64 valid = num_lines >= 64 ? ~0ull : (1ull << num_lines) - 1;
  const uint8_t* values = lines.values + line0 * f.line_stride + k0 * f.k_stride;
  alignas(64) int16_t exponents[kPanel] = {};
  __m512i scale[2] = {}, pair_of_line[2];
  for (int h = 0; h < 2; ++h) {  // word 2i: line 16h + i of the first k, word 2i + 1: of the second
    __m512i line = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                    _mm512_set1_epi32(16 * h));
    pair_of_line[h] = _mm512_or_si512(line, _mm512_slli_epi32(_mm512_or_si512(line, _mm512_set1_epi32(32)), 16));
  }
  for (int64_t k = 0; k < n; k += 2, out += kPanel) {
    if constexpr (is_scaled(E)) {
      if (k % 32 == 0) {
        const uint8_t* scales = lines.scales + line0 * f.scale_stride + (k0 + k) / 32;
        for (int i = 0; i < num_lines; ++i) exponents[i] = kExponents.of[scales[i * f.scale_stride]];
        for (int h = 0; h < 2; ++h) scale[h] = _mm512_load_si512(exponents + 32 * h);
      }
    }
    for (int i = 0; i < 2; ++i) {  // a row of the source is a page away from the next: no hardware prefetch
      const uint8_t* ahead = values + (k + i + 16) * f.k_stride;
      __builtin_prefetch(ahead);
      if (E == Element::kBF16) __builtin_prefetch(ahead + 64);
    }
    __m512i x[2], y[2] = {};
    decode_bf16_lines<E>(table, values + k * f.k_stride, valid, scale, x);
    if (k + 1 < n) decode_bf16_lines<E>(table, values + (k + 1) * f.k_stride, valid, scale, y);
    for (int i = 0; i < 4; ++i)
      _mm512_store_si512(out + 16 * i, _mm512_permutex2var_epi16(x[i / 2], pair_of_line[i % 2], y[i / 2]));
  }
}

// Lines as rows of BF16, `stride` words apart; zero from n to the next multiple of 32.
template <Element E>
static void pack_pair_rows(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t n,
                           uint32_t* out, int64_t stride) {
  LineDecoder<E> decoder;
  for (int i = 0; i < num_lines; ++i, out += stride)
    for (int64_t k = 0; k < n; k += 2 * kLineSteps) {
      decoder.begin(f, lines, line0 + i, 1, k, n - k < 2 * kLineSteps ? n - k : 2 * kLineSteps, out + k / 2, 0);
      decoder.finish();
    }
}

#endif

// FP32 panel from lines whose contraction is contiguous: decode 16 lines x 16 elements, transpose.
template <Element E>
static void pack_floats_from_rows(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t k0,
                                  int64_t n, float* out) {
  alignas(64) float tile[16][16] = {};
  for (int64_t k = 0; k < n; k += 16, out += 16 * kPanel) {
    const int64_t count = n - k < 16 ? n - k : 16;
    for (int first = 0; first < kPanel; first += 16) {
      for (int i = 0; i < 16; ++i) {
        if (first + i >= num_lines) {
          memset(tile[i], 0, sizeof(tile[i]));
        } else {
          decode_f32<E>(f, lines, line0 + first + i, k0 + k, count, tile[i]);
        }
      }
#if defined(MXMOE_ISA_AVX512)
      __m512i words[16];
      for (int i = 0; i < 16; ++i) words[i] = _mm512_load_si512(tile[i]);
      transpose16(words);
      for (int64_t s = 0; s < count; ++s) _mm512_store_si512(out + s * kPanel + first, words[s]);
#else
      for (int64_t s = 0; s < count; ++s)
        for (int i = 0; i < 16; ++i) out[s * kPanel + first + i] = tile[i][s];
#endif
    }
  }
}

// FP32 panel from lines that are neighbours in memory.
template <Element E>
static void pack_floats_from_columns(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t k0,
                                     int64_t n, float* out) {
  const uint8_t* values = lines.values + line0 * f.line_stride + k0 * f.k_stride;
  float scale[kPanel];
  for (int64_t k = 0; k < n; ++k, out += kPanel, values += f.k_stride) {
    if (is_scaled(E) && k % 32 == 0) {
      const uint8_t* scales = lines.scales + line0 * f.scale_stride + (k0 + k) / 32;
      for (int i = 0; i < num_lines; ++i) scale[i] = scale_f32<E>(scales[i * f.scale_stride]);
    }
    for (int i = 0; i < num_lines; ++i) {
      float x = element_f32<E>(values + i * f.line_stride, 0);
      out[i] = is_scaled(E) ? x * scale[i] : x;
    }
    for (int i = num_lines; i < kPanel; ++i) out[i] = 0;
  }
}

// What a step holds, and how operands are packed for it.
struct FloatStep {
  static constexpr int kPerStep = 1;
  static constexpr bool kNormalSums = false;
  static constexpr bool kSwaps = false;
  static bool in_place(const LineFormat& f, int64_t) { return f.element == Element::kF32 && !f.line_major; }
  static bool is_wide(const LineFormat&, const Lines&, int64_t, int, int64_t) { return false; }

  static void panel(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t k0, int64_t n,
                    uint32_t* out, Ahead&) {
    float* floats = reinterpret_cast<float*>(out);
    for_element(f.element, [&]<Element E>() {
      if (is_packed(E) || !f.line_major)
        pack_floats_from_rows<E>(f, lines, line0, num_lines, k0, n, floats);
      else
        pack_floats_from_columns<E>(f, lines, line0, num_lines, k0, n, floats);
    });
  }

  static void rows(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t k0, int64_t n,
                   uint32_t* out, int64_t stride) {
    for_element(f.element, [&]<Element E>() {
      for (int i = 0; i < num_lines; ++i)
        decode_f32<E>(f, lines, line0 + i, k0, n, reinterpret_cast<float*>(out + i * stride));
    });
  }

  MXMOE_INLINE f32 multiply_add(f32 sum, u32 a, f32 b) {
#if defined(MXMOE_ISA_AVX512)
    return (f32)_mm512_fmadd_ps((__m512)from_bits(a), (__m512)b, (__m512)sum);
#elif defined(MXMOE_ISA_AVX2)
    return (f32)_mm256_fmadd_ps((__m256)from_bits(a), (__m256)b, (__m256)sum);
#else
    return sum + from_bits(a) * b;
#endif
  }
};

#if defined(MXMOE_ISA_AVX512)
struct PairStep {
  static constexpr int kPerStep = 2;
  static constexpr bool kNormalSums = true;  // the instruction flushes subnormal ones
  static constexpr bool kSwaps = true;
  // The last pair of an odd contraction would read past the row.
  static bool in_place(const LineFormat& f, int64_t contraction) {
    return f.element == Element::kBF16 && !f.line_major && contraction % 2 == 0;
  }

  // Whether a line among them must take FloatSteps instead.
  static bool is_wide(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t contraction) {
    bool wide = false;
    for_element(f.element, [&]<Element E>() { wide = MXMOE_ISA::is_wide<E>(f, lines, line0, num_lines, contraction); });
    return wide;
  }

  static void panel(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t k0, int64_t n,
                    uint32_t* out, Ahead& ahead) {
    for_pair_element(f.element, [&]<Element E>() {
      if constexpr (is_scaled(E)) {
        if (f.panels) return pack_from_panel<E>(f, lines, line0, k0, n, out);
      }
      if constexpr (!is_packed(E)) {
        if (f.line_major) return pack_pairs_from_columns<E>(f, lines, line0, num_lines, k0, n, out);
      }
      if constexpr (E == Element::kBF16)
        pack_bf16_lines(f, lines, line0, num_lines, k0, n, out, ahead);
      else
        pack_turned_lines<E>(f, lines, line0, num_lines, k0, n, out, ahead);
    });
  }

  static void rows(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t, int64_t n,
                   uint32_t* out, int64_t stride) {
    for_pair_element(f.element, [&]<Element E>() { pack_pair_rows<E>(f, lines, line0, num_lines, n, out, stride); });
  }

  MXMOE_INLINE f32 multiply_add(f32 sum, u32 a, f32 b) {
    return (f32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

}  // namespace mxmoe::host::MXMOE_ISA
