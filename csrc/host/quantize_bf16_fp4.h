// BF16 -> row copies in 4 bits, in 16-bit integers: the code of |x| is the number of bounds that it reaches, and a
// bound is a BF16 number, found once for each block.
#pragma once
#include "host/quantize_bf16.h"

#if defined(MXMOE_ISA_AVX512)
namespace mxmoe::host::MXMOE_ISA {

constexpr int kGroupsTogether = 4;

// The smallest BF16 numbers whose quotients by the block's divisor round up from 0.25, 0.75, 1.25 and 1.75 (ties to
// even: 0.25 and 1.25 themselves do not). Those of 2.5, 3.5 and 5 lie one or two octaves above the last two, which are
// kept an octave lower.
struct BlockBounds {  // a block in a lane
  u32 quarter, three_quarters, five_eighths, seven_eighths;
};
struct LaneBounds {
  u16x32 quarter, three_quarters, five_eighths, seven_eighths;
};

MXMOE_INLINE u32 bound(f32 divisor, float middle, bool reached) {
  u32 b = bits(divisor * middle);
  u32 nearest = (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
  f32 quotient = from_bits(nearest << 16) / divisor;
  auto enough = reached ? quotient >= middle : quotient > middle;
  return enough ? nearest : nearest + 1u;
}

// For divisors of at least 2^-100 or so; where it is zero no bound is ever reached.
MXMOE_INLINE BlockBounds bounds_of(f32 divisor) {
  auto lasting = [&](u32 b) { return divisor == 0.0f ? splat_u32(0xffff) : b; };
  return {lasting(bound(divisor, 0.25f, false)), lasting(bound(divisor, 0.75f, true)),
          lasting(bound(divisor, 1.25f, false) - 128u), lasting(bound(divisor, 1.75f, true) - 128u)};
}

// Of 2^(scale - 127).
MXMOE_INLINE LaneBounds bounds_of_power(u16x32 scale) {
  u16x32 one = scale << 7;
  return {one - (2 << 7) + 1, one - (1 << 7) + 64, one - (1 << 7) + 32 + 1, one - (1 << 7) + 96};
}

// Signed codes in 16 bits.
MXMOE_INLINE u16x32 encode_fp4(u16x32 x, const LaneBounds& bound) {
  const __m512i magnitude = (__m512i)(x & 0x7fff), one = _mm512_set1_epi16(1);
  auto octaves = [&](u16x32 from) { return (u16x32)_mm512_subs_epu16(magnitude, (__m512i)from) >> 7; };
  u16x32 upper = octaves(bound.seven_eighths);
  __m512i code = (__m512i)(octaves(bound.five_eighths) + (upper < 2 ? upper : u16x32{} + 2));
  code = _mm512_mask_add_epi16(code, _mm512_cmpge_epu16_mask(magnitude, (__m512i)bound.quarter), code, one);
  code = _mm512_mask_add_epi16(code, _mm512_cmpge_epu16_mask(magnitude, (__m512i)bound.three_quarters), code, one);
  return (u16x32)code | (x >> 12 & 8);
}

// 64 bytes of four vectors of codes, the first of a pair in the low nibble.
MXMOE_INLINE __m512i pack_fp4(const u16x32* codes) {
  alignas(64) static constexpr auto kEveryFourth = [] {
    struct {
      uint8_t byte[64];
    } index{};
    for (int i = 0; i < 32; ++i) index.byte[i] = static_cast<uint8_t>(4 * i);
    return index;
  }();
  const __m512i index = _mm512_load_si512(&kEveryFourth);
  auto pairs = [&](int i) { return _mm512_or_si512((__m512i)codes[i], _mm512_srli_epi32((__m512i)codes[i], 12)); };
  auto half = [&](int i) { return _mm512_permutex2var_epi8(pairs(i), index, pairs(i + 1)); };
  return _mm512_inserti64x4(half(0), _mm512_castsi512_si256(half(2)), 1);
}

MXMOE_INLINE uint32_t amax_bf16_row(const uint16_t* x, int64_t cols) {
  u16x32 most[4] = {};
  for (int64_t c = 0; c < cols; c += 128)
    for (int i = 0; i < 4 && c + 32 * i < cols; ++i) most[i] = max16(most[i], load32(x + c + 32 * i) & 0x7fff);
  u16x32 m = max16(max16(most[0], most[1]), max16(most[2], most[3]));
  u32 both = max_u32((u32)m >> 16, (u32)m & 0xffffu);
  return reduce_max(both);
}

// Writes `vectors` x 32 codes of fn(vector): whole 64 bytes, then what is left.
template <typename F>
MXMOE_INLINE void put_fp4(uint8_t* values, int vectors, bool stream, F&& fn) {
  for (int k = 0; k < vectors; k += 4) {
    u16x32 codes[4] = {};
    for (int i = 0; i < 4 && k + i < vectors; ++i) codes[i] = fn(k + i);
    const __m512i v = pack_fp4(codes);
    if (k + 4 <= vectors)
      put(values + 16 * k, v, stream);
    else
      memcpy(values + 16 * k, &v, 16 * (vectors - k));
  }
}

// `vectors` x 32 elements under one global scale, in groups of 16 blocks: first the scales and bounds of all groups,
// since each waits for three divisions in turn, then the codes.
MXMOE_INLINE void quantize_nvfp4_groups(const uint16_t* x, int64_t ahead, int vectors, float global, bool stream,
                                        uint8_t* values, uint8_t* scales) {
  constexpr int kVectors = kGroupBlocks / 2;
  BlockBounds bounds[kGroupsTogether];
  uint32_t zeros[kGroupsTogether];
  for (int first = 0; first < vectors; first += kVectors) {
    u16x32 magnitudes[kVectors];
    for (int k = 0; k < kVectors; ++k)
      magnitudes[k] = first + k < vectors ? load32(x + 32 * (first + k)) & 0x7fff : u16x32{};
    f32 amax = from_bits(block_maxima<16>(magnitudes) << 16);
    u32 code = encode_nearest<E4M3, f32, u32>(bits(amax / splat(6.0f) / splat(global)));
    const u8q bytes = narrow8(code);
    const int left = vectors - first;
    memcpy(scales + 2 * first, &bytes, left < kVectors ? 2 * left : kGroupBlocks);
    bounds[first / kVectors] = bounds_of(from_bits(decode_magnitude<E4M3, f32, u32>(code)) * splat(global));
    zeros[first / kVectors] = _mm512_cmpeq_epi32_mask((__m512i)code, _mm512_setzero_si512());
  }
  put_fp4(values, vectors, stream, [&](int i) __attribute__((always_inline)) {
    const BlockBounds& own = bounds[i / kVectors];
    const int k = i % kVectors;
    const __m512i lane = _mm512_inserti64x4(_mm512_set1_epi16(static_cast<short>(4 * k)),
                                            _mm256_set1_epi16(static_cast<short>(4 * k + 2)), 1);
    auto of_lane = [&](u32 b) { return (u16x32)_mm512_permutexvar_epi16(lane, (__m512i)b); };
    __builtin_prefetch(x + ahead + 32 * i);
    u16x32 codes = encode_fp4(load32(x + 32 * i), {of_lane(own.quarter), of_lane(own.three_quarters),
                                                   of_lane(own.five_eighths), of_lane(own.seven_eighths)});
    const uint32_t empty = zeros[i / kVectors] >> 2 * k & 3;
    if (__builtin_expect(empty != 0, 0))  // no sign either
      codes = (u16x32)_mm512_maskz_mov_epi16((empty & 1 ? 0 : 0xffffu) | (empty & 2 ? 0 : 0xffff0000u), (__m512i)codes);
    return codes;
  });
}

// cols: a multiple of 32.
static inline void quantize_nvfp4_row(const uint16_t* x, int64_t ahead, int64_t cols, float global, bool stream,
                                      uint8_t* values, uint8_t* scales) {
  constexpr int kVectors = kGroupsTogether * kGroupBlocks / 2;
  auto groups = [&](int64_t c, int vectors) __attribute__((always_inline)) {
    quantize_nvfp4_groups(x + c, ahead, vectors, global, stream, values + c / 2, scales + c / 16);
  };
  int64_t c = 0;
  for (; c + 32 * kVectors <= cols; c += 32 * kVectors) groups(c, kVectors);
  if (c < cols) groups(c, static_cast<int>((cols - c) / 32));
}

// count <= 16 blocks of 32 with power-of-two scales.
MXMOE_INLINE void quantize_mxfp4_group(const uint16_t* x, int64_t ahead, int count, bool floor, bool stream,
                                       uint8_t* values, uint8_t* scales) {
  u16x32 magnitudes[kGroupBlocks];
  for (int k = 0; k < kGroupBlocks; ++k) {
    __builtin_prefetch(x + ahead + 32 * k);
    magnitudes[k] = k < count ? load32(x + 32 * k) & 0x7fff : u16x32{};
  }
  const u32 amax = block_maxima<32>(magnitudes), scale = scales_of_bf16<E2M1, u32>(amax, floor);
  const u8q bytes = narrow8(scale);
  memcpy(scales, &bytes, count);
  alignas(64) uint32_t twice[kGroupBlocks];
  store(twice, scale | scale << 16);
  const uint32_t rare = rare_blocks<E2M1>(amax, scale);
  put_fp4(values, count, stream, [&](int k) __attribute__((always_inline)) {
    if (__builtin_expect(rare >> k & 1, 0)) {
      uint8_t codes[32];
      encode_bf16_rare<E2M1>(x + 32 * k, bytes[k], codes);
      return (u16x32)_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    }
    return encode_fp4(load32(x + 32 * k), bounds_of_power((u16x32)_mm512_set1_epi32(static_cast<int>(twice[k]))));
  });
}

static inline void quantize_mxfp4_row(const uint16_t* x, int64_t ahead, int64_t num_blocks, bool floor, bool stream,
                                      uint8_t* values, uint8_t* scales) {
  for (int64_t k = 0; k < num_blocks; k += kGroupBlocks) {
    const int count = static_cast<int>(num_blocks - k < kGroupBlocks ? num_blocks - k : kGroupBlocks);
    quantize_mxfp4_group(x + 32 * k, ahead, count, floor, stream, values + 16 * k, scales + k);
  }
}

}  // namespace mxmoe::host::MXMOE_ISA
#endif
