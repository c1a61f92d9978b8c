// BF16 -> 8-bit MX copies in 16-bit integers, 32 elements a vector: the one path beside the tiles of tile.h, because
// widening to FP32 keeps those below memory speed. One Zen 4 thread, [4096 x 7168] rows, bytes per CPU second: 79 % of
// memcpy's, tiles about 30 %.
#pragma once
#include "formats.h"
#include "host/simd.h"

#if defined(MXMOE_ISA_AVX512)
namespace mxmoe::host::MXMOE_ISA {

typedef uint16_t u16x32 __attribute__((vector_size(64), may_alias));
typedef int16_t i16x32 __attribute__((vector_size(64), may_alias));
typedef uint8_t u8x32 __attribute__((vector_size(32), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), may_alias));

MXMOE_INLINE uint32_t reduce_max(u16x32 v) {
  u16x16 low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  u16x16 high = __builtin_shufflevector(v, v, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
  u16x16 half = low > high ? low : high;
  __m128i m = _mm_max_epu16(_mm256_castsi256_si128((__m256i)half), _mm256_extracti128_si256((__m256i)half, 1));
  return 0xffffu ^ (static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(~m))) & 0xffffu);  // there is no maxpos
}

// Scale byte of a block from its amax in BF16. kMax is 1.75 * 2^kMaxExponent for both elements: amax / kMax rounds up
// to the exponent's difference, and one more where amax's mantissa is beyond 1.75.
template <typename E>
MXMOE_INLINE uint32_t scale_of_bf16(uint32_t amax, bool floor) {
  static_assert(E::kMax == 1.75f * power_of_two(E::kMaxExponent));
  uint32_t exponent = (floor ? amax : amax + 31) >> 7;
  return exponent > E::kMaxExponent ? exponent - E::kMaxExponent : 0;
}

// What encode_bf16 subtracts for a scale byte: (scale - bias) in the exponent's place. S: one scale, or one per lane.
template <typename E, typename S>
MXMOE_INLINE S rebase_of(S scale) {
  return (scale - E::kBias) << 7;
}

// Codes of values that are zero or not below 2^-126, as rebase_of<E>(scale) says.
template <typename E>
MXMOE_INLINE u8x32 encode_bf16(u16x32 x, u16x32 rebase) {
  constexpr int kDrop = 7 - E::kMantissa;
  constexpr uint16_t kBelowHalf = (1 << (kDrop - 1)) - 1, kMaxCode = E::kMaxCode;
  constexpr int16_t kFirstShift = kDrop + 1;
  u16x32 magnitude = x & 0x7fff;
  u16x32 rebased = magnitude - rebase;  // exponent of the element, 7 mantissa bits
  u16x32 code = (rebased + kBelowHalf + ((rebased >> kDrop) & 1)) >> kDrop;
  code = code < kMaxCode ? code : u16x32{} + kMaxCode;
  const __mmask32 tiny = _mm512_cmplt_epi16_mask((__m512i)rebased, _mm512_set1_epi16(128));
  if (__builtin_expect(tiny != 0, 0)) {  // subnormal elements: the 8-bit significand shifted down to the grid
    i16x32 exponent = (i16x32)rebased >> 7;
    i16x32 wanted = kFirstShift - exponent;
    u16x32 shift = (u16x32)(wanted < 15 ? wanted : i16x32{} + 15);
    u16x32 significand = (magnitude & 0x7f) | 0x80;
    significand = magnitude < 0x80 ? u16x32{} : significand;
    u16x32 half = (u16x32{} + 1) << (shift - 1);
    u16x32 rounded = (significand + half - 1 + ((significand >> shift) & 1)) >> shift;
    code = (u16x32)_mm512_mask_mov_epi16((__m512i)code, tiny, (__m512i)rounded);
  }
  return __builtin_convertvector(code | ((x >> 8) & 0x80), u8x32);
}

// Any block, by way of FP32.
template <typename E>
static __attribute__((noinline)) u8x32 encode_bf16_rare(const uint16_t* x, uint32_t scale) {
  if (scale == 255) return u8x32{} + static_cast<uint8_t>(E::kPoison);
  alignas(32) uint8_t codes[32];
  const f32 factor = splat(f32_of(e8m0_inverse_bits(scale)));
  for (int i = 0; i < 32; i += kLanes) {
    u32 b = bits(f32_from_bf16(load<u16h>(x + i)) * factor);
    store(codes + i, narrow8(encode_nearest<E, f32, u32>(b & 0x7fffffffu) | (b >> 24 & 0x80u)));
  }
  u8x32 result;
  memcpy(&result, codes, 32);
  return result;
}

// A smaller scale makes codes of BF16's own subnormals.
template <typename E>
constexpr uint32_t kRareBelow = E::kBias + E::kMantissa + 1;

// num_blocks whole blocks of a row. stream: non-temporal stores where the address allows.
template <typename E>
static void quantize_bf16_row(const uint16_t* x, int64_t num_blocks, bool floor, bool stream, uint8_t* values,
                              uint8_t* scales) {
  stream = stream && reinterpret_cast<uintptr_t>(values) % 32 == 0;
  for (int64_t k = 0; k < num_blocks; ++k, x += 32, values += 32) {
    u16x32 block;
    memcpy(&block, x, sizeof(block));
    const uint32_t amax = reduce_max(block & 0x7fff);
    const uint32_t scale = amax < 0x7f80 ? scale_of_bf16<E>(amax, floor) : 255;
    const bool rare = scale < kRareBelow<E> || scale == 255;
    u8x32 codes = __builtin_expect(rare, 0)
                      ? encode_bf16_rare<E>(x, scale)
                      : encode_bf16<E>(block, u16x32{} + static_cast<uint16_t>(rebase_of<E>(scale)));
    if (stream) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(values), (__m256i)codes);
    } else {
      memcpy(values, &codes, sizeof(codes));
    }
    scales[k] = static_cast<uint8_t>(scale);
  }
}

// 32 columns of one block of a column copy: valid (<= 32) rows of x, rows_to_write of values, the rest of them zero.
template <typename E>
static void quantize_bf16_columns(const uint16_t* x, int64_t x_stride, int valid, int rows_to_write, bool floor,
                                  uint8_t* values, int64_t values_stride, uint8_t* scales, int64_t scales_stride) {
  auto row = [&](int i) {
    u16x32 v;
    memcpy(&v, x + i * x_stride, sizeof(v));
    return v;
  };
  u16x32 amax{};
  for (int i = 0; i < valid; ++i) {
    u16x32 magnitude = row(i) & 0x7fff;
    amax = amax > magnitude ? amax : magnitude;
  }
  constexpr uint16_t kMost = E::kMaxExponent;
  u16x32 exponent = (floor ? amax : amax + 31) >> 7;
  u16x32 scale = exponent > kMost ? exponent - kMost : u16x32{};
  scale = amax < 0x7f80 ? scale : u16x32{} + 255;
  const u16x32 rebase = rebase_of<E>(scale);
  for (int i = 0; i < rows_to_write; ++i) {
    u8x32 codes = i < valid ? encode_bf16<E>(row(i), rebase) : u8x32{};
    memcpy(values + i * values_stride, &codes, sizeof(codes));
  }
  const u16x32 rare_lanes = (u16x32)((scale < static_cast<uint16_t>(kRareBelow<E>)) | (scale == 255));
  for (uint32_t rare = _mm512_movepi16_mask((__m512i)rare_lanes); __builtin_expect(rare != 0, 0); rare &= rare - 1) {
    const int c = __builtin_ctz(rare);
    uint16_t column[32] = {};
    for (int i = 0; i < valid; ++i) column[i] = x[i * x_stride + c];
    u8x32 codes = encode_bf16_rare<E>(column, scale[c]);
    for (int i = 0; i < valid; ++i) values[i * values_stride + c] = codes[i];
  }
  const u8x32 bytes = __builtin_convertvector(scale, u8x32);
  for (int c = 0; c < 32; ++c) scales[c * scales_stride] = bytes[c];
}

}  // namespace mxmoe::host::MXMOE_ISA
#endif
