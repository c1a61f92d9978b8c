// Tiles of a few rows without BF16 products: 32-bit words of kLanes lines at a time, decoded and multiplied in FP32.
#pragma once
#include "host/gemm/few_rows.h"

#if !defined(MXMOE_ISA_AVX512)
namespace mxmoe::host::MXMOE_ISA {

template <Element E>
constexpr int kPerWord = E == Element::kBF16 ? 2
                         : is_packed(E)      ? 8
                                             : 4;

// FP32 of magnitudes whose exponents, of this bias, start at bit 23; the lowest exponent has subnormals.
template <int kBias>
MXMOE_INLINE f32 wider_float(u32 magnitude) {
  constexpr uint32_t kShift = uint32_t{127 - kBias} << 23, kOne = uint32_t{1} << 23;
  const u32 subnormal = (u32)((i32)magnitude < (i32)splat_u32(kOne));
  // With an exponent and a leading one too many, which is then subtracted.
  return from_bits(magnitude + kShift + (subnormal & kOne)) - from_bits(subnormal & (kShift + kOne));
}

// E4M3 or E5M2 codes in the top bytes, but for Inf and NaN.
template <bool kE5M2>
MXMOE_INLINE f32 f32_of_top_bytes(u32 code) {
  const f32 magnitude = wider_float<kE5M2 ? 15 : 7>((code & 0x7f000000u) >> (kE5M2 ? 3 : 4));
  return from_bits(bits(magnitude) | (code & 0x80000000u));
}

// Element i of each word, without its scale, but for Inf and NaN.
template <Element E>
MXMOE_INLINE f32 element_of_words(u32 words, int i) {
  if constexpr (E == Element::kBF16) return from_bits(i == 0 ? words << 16 : words & 0xffff0000u);
  if constexpr (is_packed(E)) {
    const u32 code = words >> (4 * i), sign = (words << (28 - 4 * i)) & 0x80000000u;
#if defined(MXMOE_ISA_AVX2)
    const u32 magnitude = (u32)_mm256_permutevar8x32_ps(_mm256_loadu_ps(kCodes.e2m1), (__m256i)code);
#else
    const u32 magnitude = bits(wider_float<1>((code & 7u) << 22));
#endif
    return from_bits(magnitude | sign);
  }
  return f32_of_top_bytes<E == Element::kMxE5M2>(words << (24 - 8 * i));
}

// Not zero where an 8-bit code of the word is Inf or NaN.
template <Element E>
MXMOE_INLINE u32 special_codes(u32 words) {
  if constexpr (E == Element::kMxE4M3) return ((words & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  if constexpr (E == Element::kMxE5M2) return ((words & 0x7c7c7c7cu) + 0x04040404u) & 0x80808080u;
  return u32{};
}

template <Element E>
static __attribute__((noinline)) f32 special_element_of_words(u32 words, int i) {
  f32 x;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint8_t code = static_cast<uint8_t>(words[lane] >> (8 * i));
    x[lane] = element_f32<E>(&code, 0);
  }
  return x;
}

template <Element E>
MXMOE_INLINE f32 scales_of_bytes(u32 s) {
  if constexpr (E == Element::kNvE2M1) {
    const f32 x = f32_of_top_bytes<false>(s << 24);
    const u32 nan = (s & 0x80u) << 24 | 0x7fc00000u;
    return from_bits((s & 0x7fu) == 0x7fu ? nan : bits(x));
  }
  const u32 x = s == 0u ? splat_u32(0x00400000u) : s << 23;
  return from_bits(s == 255u ? splat_u32(0x7fc00000u) : x);
}

// 16 bytes of each of kLanes lines as words, a line per lane.
MXMOE_INLINE void turn_16_bytes(const uint8_t* const* lines, int64_t byte, u32 words[4]) {
#if defined(MXMOE_ISA_AVX2)
  __m256i z[4];
  for (int i = 0; i < 4; ++i)
    z[i] = _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(lines[4 + i] + byte),
                               reinterpret_cast<const __m128i*>(lines[i] + byte));
  const __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpacklo_epi32(z[2], z[3]);
  const __m256i c = _mm256_unpackhi_epi32(z[0], z[1]), d = _mm256_unpackhi_epi32(z[2], z[3]);
  words[0] = (u32)_mm256_unpacklo_epi64(a, b), words[1] = (u32)_mm256_unpackhi_epi64(a, b);
  words[2] = (u32)_mm256_unpacklo_epi64(c, d), words[3] = (u32)_mm256_unpackhi_epi64(c, d);
#else
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < kLanes; ++i) {
      uint32_t word;
      memcpy(&word, lines[i] + byte + 4 * j, 4);
      words[j][i] = word;
    }
#endif
}

// Where V groups of kLanes lines are. Absent lines are the last one once more.
template <Element E, int V>
class SeparateLines {
 public:
  SeparateLines(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t contraction)
      : value_bytes_((contraction * 4 + kPerWord<E> - 1) / kPerWord<E>), blocks_(contraction + block_of(E) - 1) {
    blocks_ /= block_of(E);
    for (int i = 0; i < V * kLanes; ++i) {
      const int64_t line = line0 + (i < num_lines ? i : num_lines - 1);
      values_[i] = lines.values + line * f.line_stride, scales_[i] = lines.scales + line * f.scale_stride;
    }
  }

  // Four words of group v from element k on; past the end they are zero.
  __attribute__((always_inline)) void words(int v, int64_t k, u32 out[4]) const {
    const int64_t byte = k * 4 / kPerWord<E>, left = value_bytes_ - byte;
    if (left >= 16) return turn_16_bytes(values_ + v * kLanes, byte, out);
    uint8_t copies[kLanes][16] = {};
    const uint8_t* copy[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      memcpy(copies[i], values_[v * kLanes + i] + byte, left);
      copy[i] = copies[i];
    }
    turn_16_bytes(copy, 0, out);
  }

  // Scale bytes of a block, blocks ascending.
  __attribute__((always_inline)) u32 scales(int v, int64_t block) {
    if (block % 4 == 0) {
      const int64_t count = smaller(4, blocks_ - block);
      for (int i = 0; i < kLanes; ++i) {
        uint32_t word = 0;
        if (count == 4)
          memcpy(&word, scales_[v * kLanes + i] + block, 4);
        else
          memcpy(&word, scales_[v * kLanes + i] + block, count);
        scale_words_[v][i] = word;
      }
    }
    return (scale_words_[v] >> (8 * static_cast<uint32_t>(block % 4))) & 255u;
  }

  __attribute__((always_inline)) void fetch(Fetch& ahead, int64_t k) const {
    constexpr int kLines = V * kLanes;
    ahead.values.fetch(kLines / 4);
    if (is_scaled(E) && k % (4 * block_of(E)) == 0) ahead.scales.fetch(kLines < 16 ? 1 : kLines / 16);
  }

 private:
  const uint8_t *values_[V * kLanes], *scales_[V * kLanes];
  u32 scale_words_[V];
  int64_t value_bytes_, blocks_;
};

// The same of lines in a panel, each part of which is read once.
template <Element E, int V>
class PanelLines {
 public:
  PanelLines(const LineFormat& f, const Lines& lines, int64_t line0, int, int64_t) {
    const int64_t panel = line0 / kPanel * kPanel;
    values_ = lines.values + panel * f.line_stride + 4 * (line0 - panel);
    scales_ = lines.scales + panel * f.scale_stride + (line0 - panel);
  }

  __attribute__((always_inline)) void words(int v, int64_t k, u32 out[4]) const {
    const uint8_t* p = values_ + k / kPerWord<E> * (4 * kPanel) + 4 * kLanes * v;
    for (int i = 0; i < 4; ++i) out[i] = in_order(load<u32>(reinterpret_cast<const uint32_t*>(p + i * 4 * kPanel)));
  }
  __attribute__((always_inline)) u32 scales(int v, int64_t block) const {
    return widen(load<u8q>(scales_ + block * kPanel + kLanes * v));
  }
  __attribute__((always_inline)) void fetch(Fetch&, int64_t k) const {
    constexpr int64_t kAhead = 4096, kScalesAhead = 1024;
    const uint8_t* p = values_ + k / kPerWord<E> * (4 * kPanel);
    for (int i = 0; i < 4; ++i)
      for (int line = 0; line < V * kLanes; line += 16) prefetch_past(p + i * 4 * kPanel + 4 * line, kAhead);
    prefetch_past(scales_ + k / block_of(E) * kPanel, kScalesAhead);
  }

 private:
  // 8-bit codes come in pairs of elements: four lines' first, then their second.
  MXMOE_INLINE u32 in_order(u32 x) {
    if constexpr (is_packed(E)) return x;
    typedef uint16_t pairs __attribute__((vector_size(4 * kLanes)));
#if defined(MXMOE_ISA_AVX2)
    return (u32)__builtin_shufflevector((pairs)x, (pairs)x, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
#else
    return (u32)__builtin_shufflevector((pairs)x, (pairs)x, 0, 4, 1, 5, 2, 6, 3, 7);
#endif
  }

  const uint8_t *values_, *scales_;
};

// R rows of A times V groups of kLanes lines.
template <Element E, int R, int V, class Source>
__attribute__((noinline)) static void multiply_words(Source source, int64_t contraction, const uint32_t* const* rows,
                                                     float* sums, Fetch& ahead) {
  constexpr int kElements = 4 * kPerWord<E>;  // of 16 bytes
  constexpr bool kHasSpecial = E == Element::kMxE4M3 || E == Element::kMxE5M2;
  f32 sum[R][V] = {}, scale[V];
  const auto multiply = [&]<bool kOrdinary>(const u32(&words)[V][4], int64_t k, int count)
                            __attribute__((always_inline)) {
#pragma GCC unroll 32
                              for (int i = 0; i < kElements; ++i) {
                                if (!kOrdinary && i >= count) return;
                                if (is_scaled(E) && i % 16 == 0)
                                  for (int v = 0; v < V; ++v)
                                    scale[v] = scales_of_bytes<E>(source.scales(v, (k + i) / block_of(E)));
                                f32 b[V];
                                for (int v = 0; v < V; ++v) {
                                  const u32 word = words[v][i / kPerWord<E>];
                                  b[v] = kHasSpecial && !kOrdinary ? special_element_of_words<E>(word, i % kPerWord<E>)
                                                                   : element_of_words<E>(word, i % kPerWord<E>);
                                  if (is_scaled(E)) b[v] *= scale[v];
                                }
                                for (int r = 0; r < R; ++r)
                                  for (int v = 0; v < V; ++v)
                                    sum[r][v] = FloatStep::multiply_add(sum[r][v], splat_u32(rows[r][k + i]), b[v]);
                              }
                            };
  for (int64_t k = 0; k < contraction; k += kElements) {
    source.fetch(ahead, k);
    u32 words[V][4], special = {};
    for (int v = 0; v < V; ++v) {
      source.words(v, k, words[v]);
      for (int w = 0; kHasSpecial && w < 4; ++w) special |= special_codes<E>(words[v][w]);
    }
    if (contraction - k >= kElements && !(kHasSpecial && any_above(special, 0))) [[likely]]
      multiply.template operator()<true>(words, k, kElements);
    else
      multiply.template operator()<false>(words, k, static_cast<int>(smaller(kElements, contraction - k)));
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums + r * kPanel + v * kLanes, sum[r][v]);
}

template <Element E>
struct FewFloats {
  using Step = FloatStep;

  static constexpr int groups(int num_rows) { return num_rows > 2 ? 2 : 4; }

  // Lines that are multiplied with so many rows at once.
  static int tile(const LineFormat&, int num_rows) { return groups(num_rows) * kLanes; }

  template <int R>
  static bool multiply(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t contraction,
                       const uint32_t* const* rows, float* sums, Fetch& ahead) {
    constexpr int V = groups(R);
    const auto run = [&](auto source) { multiply_words<E, R, V>(source, contraction, rows, sums, ahead); };
    if (is_scaled(E) && f.panels)
      run(PanelLines<E, V>(f, lines, line0, num_lines, contraction));
    else
      run(SeparateLines<E, V>(f, lines, line0, num_lines, contraction));
    return true;
  }
};

}  // namespace mxmoe::host::MXMOE_ISA
#endif
