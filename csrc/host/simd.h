// Vectors of kLanes 32-bit lanes, one definition for every instruction set (GCC vector extensions lower to the set the
// file is compiled for). Kernels are written against these; an instruction that only one set has is guarded by
// MXMOE_ISA_AVX512 here or beside its use. Everything is in the set's own namespace and inlined: see isa.h.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MXMOE_INLINE static inline __attribute__((always_inline))

namespace mxmoe::host::MXMOE_ISA {

#if defined(MXMOE_ISA_AVX512)
constexpr int kLanes = 16;
#elif defined(MXMOE_ISA_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float f32 __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t i32 __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint32_t u32 __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint16_t u16h __attribute__((vector_size(2 * kLanes), may_alias));  // kLanes 16-bit values
typedef uint8_t u8q __attribute__((vector_size(kLanes), may_alias));        // kLanes bytes

template <typename V, typename T>
MXMOE_INLINE V load(const T* p) {  // unaligned
  static_assert(sizeof(V) == sizeof(T) * kLanes);
  V v;
  memcpy(&v, p, sizeof(V));
  return v;
}
template <typename V, typename T>
MXMOE_INLINE void store(T* p, V v) {
  static_assert(sizeof(V) == sizeof(T) * kLanes);
  memcpy(p, &v, sizeof(V));
}
MXMOE_INLINE f32 splat(float x) {
  return x - (f32{});
}  // x - 0 keeps the sign of zero
MXMOE_INLINE u32 splat_u32(uint32_t x) {
  return x + (u32{});
}
MXMOE_INLINE u32 bits(f32 x) {
  return (u32)x;
}
MXMOE_INLINE f32 from_bits(u32 x) {
  return (f32)x;
}
MXMOE_INLINE i32 lane_indices() {
  i32 v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// v[i] = step(i), all of them before what follows. GCC would finish one chain of operations after the other, of which
// a core holds five or six at once; side by side, a step of all of them is ready.
template <int N, typename F>
MXMOE_INLINE void side_by_side(f32 (&v)[N], F&& step) {
  for (int i = 0; i < N; ++i) v[i] = step(i);
#if defined(__x86_64__)
  for (int i = 0; i < N; ++i) asm("" : "+v"(v[i]));
#endif
}

// c - a * b, where a * b is exact: one rounding either way.
MXMOE_INLINE f32 minus_exact_product(f32 c, f32 a, float b) {
#if defined(MXMOE_ISA_AVX512)
  return (f32)_mm512_fnmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)c);
#elif defined(MXMOE_ISA_AVX2)
  return (f32)_mm256_fnmadd_ps((__m256)a, _mm256_set1_ps(b), (__m256)c);
#else
  return c - a * b;
#endif
}

MXMOE_INLINE u32 max_u32(u32 a, u32 b) {
  return a > b ? a : b;
}
MXMOE_INLINE u32 min_u32(u32 a, u32 b) {
  return a < b ? a : b;
}

// By name where GCC 12 takes halves apart; masked, because it warns of an undefined operand inside the plain forms.
MXMOE_INLINE u32 widen(u16h x) {
#if defined(MXMOE_ISA_AVX512)
  return (u32)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x);
#else
  return __builtin_convertvector(x, u32);
#endif
}
MXMOE_INLINE u32 widen(u8q x) {
#if defined(MXMOE_ISA_AVX512)
  return (u32)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)x);
#else
  return __builtin_convertvector(x, u32);
#endif
}
MXMOE_INLINE u16h narrow16(u32 x) {
  return __builtin_convertvector(x, u16h);
}
MXMOE_INLINE u8q narrow8(u32 x) {
  return __builtin_convertvector(x, u8q);
}

// Largest lane.
MXMOE_INLINE uint32_t reduce_max(u32 v) {
#if defined(MXMOE_ISA_AVX512) || defined(MXMOE_ISA_AVX2)
#if defined(MXMOE_ISA_AVX512)
  __m256i half = _mm256_max_epu32((__m256i)__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                                  (__m256i)__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#else
  __m256i half = (__m256i)v;
#endif
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1))));
#else
  uint32_t a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
#endif
}

MXMOE_INLINE bool any_above(u32 v, uint32_t limit) {
#if defined(MXMOE_ISA_AVX512)
  return _mm512_cmpgt_epu32_mask((__m512i)v, _mm512_set1_epi32(static_cast<int>(limit))) != 0;
#elif defined(MXMOE_ISA_AVX2)
  return _mm256_movemask_ps((__m256)(v > limit)) != 0;
#else
  return reduce_max(v) > limit;
#endif
}

// BF16 <-> FP32. bf16 rounds to nearest even; NaN becomes a quiet NaN of the same sign.
MXMOE_INLINE f32 f32_from_bf16(u16h x) {
  return from_bits(widen(x) << 16);
}
// In the upper halves of the lanes; the lower ones are what was rounded away.
MXMOE_INLINE u32 rounded_to_bf16(f32 x) {
  u32 b = bits(x), nan = b | 0x400000u;
  return (b & 0x7fffffffu) > 0x7f800000u ? nan : b + 0x7fffu + ((b >> 16) & 1u);
}
MXMOE_INLINE u16h bf16_from_f32(f32 x) {
#if defined(MXMOE_ISA_AVX512)
  constexpr int kSubnormal = 0x20;  // the one class that the instruction would flush
  if (!_mm512_fpclass_ps_mask((__m512)x, kSubnormal)) [[likely]]
    return (u16h)_mm512_cvtneps_pbh((__m512)x);
#endif
  return narrow16(rounded_to_bf16(x) >> 16);
}

// Scalars of the same conversions.
MXMOE_INLINE float f32_of(uint32_t b) {
  float x;
  memcpy(&x, &b, 4);
  return x;
}
MXMOE_INLINE uint32_t bits_of(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  return b;
}
MXMOE_INLINE float f32_of_bf16(uint16_t x) {
  return f32_of(uint32_t{x} << 16);
}
MXMOE_INLINE uint16_t bf16_of(float x) {
  uint32_t b = bits_of(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((b >> 16) | 0x40u);
  return static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
MXMOE_INLINE float f32_of_f16(uint16_t h) {  // exact
  uint32_t sign = uint32_t{h & 0x8000u} << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  if (exponent == 31) return f32_of(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return f32_of(sign | (exponent + 112) << 23 | mantissa << 13);
  float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return f32_of(sign | bits_of(magnitude));
}

// memcpy past the cache, for what is not read again soon; kAhead: bytes to prefetch ahead, 0: none. Fence when done.
template <int64_t kAhead = 0>
MXMOE_INLINE void stream_copy(char* to, const char* from, int64_t bytes) {
  int64_t i = 0;
#if defined(__x86_64__)
  i = -reinterpret_cast<intptr_t>(to) & 63;
  if (i > bytes) i = bytes;
  memcpy(to, from, i);
  for (; i + 64 <= bytes; i += 64) {
    if (kAhead) __builtin_prefetch(from + i + kAhead);
#if defined(MXMOE_ISA_AVX512)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#else
    for (int64_t j = i; j < i + 64; j += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
#endif
  }
#endif
  memcpy(to + i, from + i, bytes - i);
}

}  // namespace mxmoe::host::MXMOE_ISA
