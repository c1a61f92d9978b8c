// Lines whose contraction is contiguous as rows of BF16, 64 elements at a time, so that other work can go on in
// between.
#pragma once
#include "host/gemm/turn.h"

namespace mxmoe::host::MXMOE_ISA {

constexpr int kLineSteps = 512, kMostLines = 6;  // decoded at a time

#if defined(MXMOE_ISA_AVX512)

// 64 elements of a line -> BF16, by what the scales of a piece of 2 * kLineSteps elements were made into.
template <Element E>
struct UnitDecoder;

template <>
struct UnitDecoder<Element::kBF16> {
  struct Scales {};
  void set_scales(Scales&, const uint8_t*, int64_t) const {}

  template <bool kWhole>
  __attribute__((always_inline)) void decode(const uint8_t* values, const Scales&, int, int count,
                                             __m512i out[2]) const {
    const __mmask64 valid = first_bytes<__mmask64>(count);
    for (int i = 0; i < 2; ++i) {
      const uint8_t* p = values + 64 * i;
      out[i] = kWhole ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(static_cast<__mmask32>(valid >> 32 * i), p);
    }
  }
};

template <Element E>
  requires(E == Element::kMxE4M3 || E == Element::kMxE5M2)
struct UnitDecoder<E> {
  CodeBytes table = code_bytes<E>();
  struct Scales {
    alignas(64) int16_t exponents[2 * kLineSteps / 32];
  };
  void set_scales(Scales& s, const uint8_t* scales, int64_t blocks) const {
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(first_bytes<__mmask32>(blocks), scales));
    _mm512_store_si512(s.exponents, _mm512_add_epi16(_mm512_slli_epi16(words, 7), _mm512_set1_epi16(exponent_of(0))));
  }

  template <bool kWhole>
  __attribute__((always_inline)) void decode(const uint8_t* values, const Scales& s, int unit, int count,
                                             __m512i out[2]) const {
    const __m512i codes =
        kWhole ? _mm512_loadu_si512(values) : _mm512_maskz_loadu_epi8(first_bytes<__mmask64>(count), values);
    bf16_from_codes(table, codes, out[0], out[1]);
    for (int i = 0; i < 2; ++i) out[i] = scale_bf16(out[i], _mm512_set1_epi16(s.exponents[2 * unit + i]));
  }
};

// As in TurnedLines: magnitude x significand of the scale, the exponents subtracted.
template <Element E>
  requires(is_packed(E))
struct UnitDecoder<E> {
  static constexpr int kBlocks = 64 / block_of(E), kMost = 2 * kLineSteps / block_of(E);
  struct Scales {
    alignas(64) uint16_t significand[kMost], lower[kMost];
  };
  void set_scales(Scales& s, const uint8_t* scales, int64_t blocks) const {
    const auto& t = TurnedLines<E>::kTables;
    const __m512i bytes = _mm512_maskz_loadu_epi8(first_bytes<__mmask64>(blocks), scales);
    static_assert(kMost == 32 || kMost == 64);
    const auto put = [](uint16_t* to, __m512i x, int shift) {
      _mm512_store_si512(to, _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm512_castsi512_si256(x)), shift));
      if constexpr (kMost == 64)
        _mm512_store_si512(to + 32, _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(x, 1)), shift));
    };
    if constexpr (E == Element::kNvE2M1) {
      const auto look_up = [&](const uint8_t* table) {
        return _mm512_permutex2var_epi8(_mm512_loadu_si512(table), bytes, _mm512_loadu_si512(table + 64));
      };
      put(s.significand, look_up(t.significand), 3);
      put(s.lower, look_up(t.below), 7);
    } else {
      put(s.lower, _mm512_sub_epi8(_mm512_set1_epi8(static_cast<char>(127 + TurnedLines<E>::kTop)), bytes), 7);
    }
  }

  // Scales of 32 elements of the unit's 64: one, or two that are 16 lanes each.
  MXMOE_INLINE __m512i spread(const uint16_t* scales, int half) {
    if constexpr (kBlocks == 2) return _mm512_set1_epi16(static_cast<int16_t>(scales[half]));
    int64_t all;
    memcpy(&all, scales, 8);
    const __m512i order = _mm512_inserti64x4(_mm512_set1_epi16(static_cast<int16_t>(0x0100 + 0x0404 * half)),
                                             _mm256_set1_epi16(static_cast<int16_t>(0x0302 + 0x0404 * half)), 1);
    return _mm512_shuffle_epi8(_mm512_set1_epi64(all), order);
  }

  template <bool kWhole>
  __attribute__((always_inline)) void decode(const uint8_t* values, const Scales& s, int unit, int count,
                                             __m512i out[2]) const {
    const auto& t = TurnedLines<E>::kTables;
    const __m512i low_bits = _mm512_set1_epi16(7), sign_bit = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
    const __m512i fields = _mm512_set1_epi64(0x080c'0408'0004'3c00);  // of each half: see TurnedLines
    for (int i = 0; i < 2; ++i) {
      const uint8_t* p = values + 16 * i;
      const __m128i bytes = kWhole ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                                   : _mm_maskz_loadu_epi8(first_bytes<__mmask16>((count - 32 * i + 1) / 2), p);
      const __m512i codes = _mm512_multishift_epi64_epi8(fields, _mm512_cvtepu16_epi64(bytes));
      const __m512i significand = E == Element::kNvE2M1 ? spread(s.significand + kBlocks * unit, i) : __m512i{};
      const __m512i index = _mm512_ternarylogic_epi32(codes, low_bits, significand, 0xea);
      const __m512i x = _mm512_subs_epu16(
          _mm512_permutex2var_epi16(_mm512_loadu_si512(t.product), index, _mm512_loadu_si512(t.product + 32)),
          spread(s.lower + kBlocks * unit, i));
      out[i] = _mm512_ternarylogic_epi32(x, codes, sign_bit, 0xf8);
      if (!kWhole) out[i] = _mm512_maskz_mov_epi16(first_bytes<__mmask32>(count - 32 * i), out[i]);
    }
  }
};

// Up to kMostLines lines over up to 2 * kLineSteps elements, written as rows `stride` words apart; zero from the last
// element to the next multiple of 32.
template <Element E>
class LineDecoder {
 public:
  // k0: a multiple of 64.
  void begin(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines, int64_t k0, int64_t n,
             uint32_t* out, int64_t stride) {
    const uint8_t* scales = lines.scales + line0 * f.scale_stride + k0 / block_of(E);
    if constexpr (is_scaled(E))
      for (int i = 0; i < num_lines; ++i, scales += f.scale_stride)
        decoder_.set_scales(scales_[i], scales, (n + block_of(E) - 1) / block_of(E));
    line_ = at<E>(lines.values + line0 * f.line_stride, f.k_stride, k0), line_stride_ = f.line_stride;
    out_ = out, out_stride_ = stride;
    count_ = static_cast<int>(n), index_ = 0, unit_ = 0, left_ = num_lines * ((count_ + 63) / 64);
  }

  int left() const { return left_; }  // units

  __attribute__((always_inline)) void unit() {
    constexpr int kBytes = is_packed(E) ? 32 : E == Element::kBF16 ? 128 : 64;
    const uint8_t* values = line_ + unit_ * kBytes;
    const int count = count_ - 64 * unit_;
    __m512i out[2];
    if (count >= 64) [[likely]]
      decoder_.template decode<true>(values, scales_[index_], unit_, 64, out);
    else
      decoder_.template decode<false>(values, scales_[index_], unit_, count, out);
    _mm512_storeu_si512(out_ + 32 * unit_, out[0]);
    if (count > 32) _mm512_storeu_si512(out_ + 32 * unit_ + 16, out[1]);
    --left_, ++unit_;
    if (count <= 64) line_ += line_stride_, out_ += out_stride_, ++index_, unit_ = 0;
  }

  __attribute__((always_inline)) void finish() {
    while (left_) unit();
  }

 private:
  UnitDecoder<E> decoder_;
  typename UnitDecoder<E>::Scales scales_[kMostLines];
  const uint8_t* line_ = nullptr;
  uint32_t* out_ = nullptr;
  int64_t line_stride_ = 0, out_stride_ = 0;
  int count_ = 0, index_ = 0, unit_ = 0, left_ = 0;
};

#endif

}  // namespace mxmoe::host::MXMOE_ISA
