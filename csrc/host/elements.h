// FP32, BF16 and FP16 elements in memory as vectors of FP32: load exactly, store with one rounding to nearest even.
#pragma once
#include <type_traits>

#include "host/simd.h"
#include "tensor.h"

namespace mxmoe::host::MXMOE_ISA {

template <DType D>
using stored = std::conditional_t<D == DType::kF32, float, uint16_t>;

MXMOE_INLINE uint16_t f16_of(float x) {
  uint32_t b = bits_of(x), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past 65504
  if (magnitude < 0x38800000u)  // subnormal: adding 0.5 leaves the rounded count of 2^-24 in the low bits
    return static_cast<uint16_t>(sign | (bits_of(f32_of(magnitude) + 0.5f) - bits_of(0.5f)));
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

// The masked forms, because GCC 12 warns of an undefined operand inside the plain ones.
MXMOE_INLINE f32 f32_from_f16(u16h x) {
#if defined(MXMOE_ISA_AVX512)
  return (f32)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
#elif defined(MXMOE_ISA_AVX2)
  return (f32)_mm256_cvtph_ps((__m128i)x);
#else
  f32 y;
  for (int i = 0; i < kLanes; ++i) y[i] = f32_of_f16(x[i]);
  return y;
#endif
}

MXMOE_INLINE u16h f16_from_f32(f32 x) {
#if defined(MXMOE_ISA_AVX512)
  return (u16h)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(MXMOE_ISA_AVX2)
  return (u16h)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  u16h y;
  for (int i = 0; i < kLanes; ++i) y[i] = f16_of(x[i]);
  return y;
#endif
}

template <DType D>
MXMOE_INLINE f32 load_elements(const stored<D>* p) {
  if constexpr (D == DType::kF32) {
    return load<f32>(p);
  } else {
    u16h x = load<u16h>(p);
    return D == DType::kBF16 ? f32_from_bf16(x) : f32_from_f16(x);
  }
}

template <DType D>
MXMOE_INLINE u16h round_elements(f32 x) {
  return D == DType::kBF16 ? bf16_from_f32(x) : f16_from_f32(x);
}

template <DType D>
MXMOE_INLINE void store_elements(stored<D>* p, f32 x) {
  if constexpr (D == DType::kF32)
    store(p, x);
  else
    store(p, round_elements<D>(x));
}

// Two vectors around the caches, where the set has such a store; p is aligned to 64 bytes, and a fence must follow.
template <DType D>
MXMOE_INLINE void stream_elements(stored<D>* p, f32 a, f32 b) {
#if defined(MXMOE_ISA_AVX512)
  if constexpr (D == DType::kF32) {
    _mm512_stream_ps(p, (__m512)a), _mm512_stream_ps(p + kLanes, (__m512)b);
  } else {
    __m512i x = _mm512_castsi256_si512((__m256i)round_elements<D>(a));
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_inserti64x4(x, (__m256i)round_elements<D>(b), 1));
  }
#elif defined(MXMOE_ISA_AVX2)
  if constexpr (D == DType::kF32) {
    _mm256_stream_ps(p, (__m256)a), _mm256_stream_ps(p + kLanes, (__m256)b);
  } else {
    auto* to = reinterpret_cast<__m128i*>(p);
    _mm_stream_si128(to, (__m128i)round_elements<D>(a)), _mm_stream_si128(to + 1, (__m128i)round_elements<D>(b));
  }
#else
  store_elements<D>(p, a), store_elements<D>(p + kLanes, b);
#endif
}

MXMOE_INLINE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// The first n < kLanes elements; the rest loads as zero and is not written.
template <DType D>
MXMOE_INLINE f32 load_elements(const stored<D>* p, int n) {
  stored<D> part[kLanes] = {};
  memcpy(part, p, n * sizeof(*p));
  return load_elements<D>(part);
}

template <DType D>
MXMOE_INLINE void store_elements(stored<D>* p, f32 x, int n) {
  stored<D> part[kLanes];
  store_elements<D>(part, x);
  memcpy(p, part, n * sizeof(*p));
}

// n <= kLanes elements.
template <DType D>
MXMOE_INLINE f32 load_some(const stored<D>* p, int n) {
  return n == kLanes ? load_elements<D>(p) : load_elements<D>(p, n);
}
template <DType D>
MXMOE_INLINE void store_some(stored<D>* p, f32 x, int n) {
  if (n == kLanes)
    store_elements<D>(p, x);
  else
    store_elements<D>(p, x, n);
}

// kLanes pairs a0, b0, a1, b1, ... A pair is one little-endian integer of twice the width.
typedef uint64_t u64d __attribute__((vector_size(8 * kLanes), may_alias));

#if defined(MXMOE_ISA_AVX512)
// Element i of the first half, element i of the second half, ...
MXMOE_INLINE __m512i pair_order() {
  alignas(64) static constexpr auto kOrder = [] {
    struct {
      uint16_t index[32];
    } order{};
    for (int i = 0; i < 32; ++i) order.index[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
    return order;
  }();
  return _mm512_load_si512(&kOrder);
}
#endif

template <DType D>
MXMOE_INLINE void load_pairs(const stored<D>* p, f32& a, f32& b) {
  if constexpr (D == DType::kF32) {
    u64d pair;
    memcpy(&pair, p, sizeof(pair));
    a = from_bits(__builtin_convertvector(pair, u32));
    b = from_bits(__builtin_convertvector(pair >> 32, u32));
  } else {
    u32 pair;
    memcpy(&pair, p, sizeof(pair));
    if constexpr (D == DType::kBF16)
      a = from_bits(pair << 16), b = from_bits(pair & 0xffff0000u);
    else
      a = f32_from_f16(narrow16(pair & 0xffffu)), b = f32_from_f16(narrow16(pair >> 16));
  }
}

template <DType D>
MXMOE_INLINE void store_pairs(stored<D>* p, f32 a, f32 b) {
  if constexpr (D == DType::kF32) {
    u64d pair = __builtin_convertvector(bits(a), u64d) | __builtin_convertvector(bits(b), u64d) << 32;
    memcpy(p, &pair, sizeof(pair));
  } else if constexpr (D == DType::kF16) {
    u32 pair = widen(f16_from_f32(a)) | widen(f16_from_f32(b)) << 16;
    memcpy(p, &pair, sizeof(pair));
  } else {
#if defined(MXMOE_ISA_AVX512)
    // The instruction would flush a subnormal, which is then among the zeros.
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    if (!_mm512_testn_epi16_mask(halves, _mm512_set1_epi16(0x7fff))) [[likely]] {
      const __m512i pair = _mm512_permutexvar_epi16(pair_order(), halves);
      memcpy(p, &pair, sizeof(pair));
      return;
    }
#endif
    u32 pair = rounded_to_bf16(a) >> 16 | (rounded_to_bf16(b) & 0xffff0000u);
    memcpy(p, &pair, sizeof(pair));
  }
}

// Two vectors of elements in the order that costs the least, of BF16 the even and the odd ones; store_two undoes it.
template <DType D>
MXMOE_INLINE void load_two(const stored<D>* p, f32& a, f32& b) {
  if constexpr (D == DType::kBF16)
    load_pairs<D>(p, a, b);
  else
    a = load_elements<D>(p), b = load_elements<D>(p + kLanes);
}

template <DType D>
MXMOE_INLINE void store_two(stored<D>* p, f32 a, f32 b) {
  if constexpr (D == DType::kBF16)
    store_pairs<D>(p, a, b);
  else
    store_elements<D>(p, a), store_elements<D>(p + kLanes, b);
}

// Calls body.template operator()<D>() for a floating-point dtype.
template <typename F>
MXMOE_INLINE void with_dtype(DType dtype, F&& body) {
  if (dtype == DType::kF32)
    body.template operator()<DType::kF32>();
  else if (dtype == DType::kBF16)
    body.template operator()<DType::kBF16>();
  else
    body.template operator()<DType::kF16>();
}

}  // namespace mxmoe::host::MXMOE_ISA
