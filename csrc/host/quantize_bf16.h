// BF16 -> copies in 16-bit integers, 32 elements a vector: the one path beside the tiles of tile.h, because widening to
// FP32 keeps those below memory speed. A group is 16 blocks of a row: their amaxes are reduced together, their scales
// are one vector. A column copy has its blocks in lanes and reduces nothing.
#pragma once
#include "formats.h"
#include "host/simd.h"

#if defined(MXMOE_ISA_AVX512)
namespace mxmoe::host::MXMOE_ISA {

typedef uint16_t u16x32 __attribute__((vector_size(64), may_alias));
typedef int16_t i16x32 __attribute__((vector_size(64), may_alias));

constexpr int kGroupBlocks = 16;
constexpr int kMaxStripCols = 512;

MXMOE_INLINE u16x32 load32(const uint16_t* x) {
  u16x32 v;
  memcpy(&v, x, sizeof(v));
  return v;
}
MXMOE_INLINE u16x32 splat16(uint32_t x) {
  return (u16x32)_mm512_set1_epi16(static_cast<short>(x));
}
MXMOE_INLINE u16x32 max16(u16x32 a, u16x32 b) {
  return (u16x32)_mm512_max_epu16((__m512i)a, (__m512i)b);
}

// amaxes of 16 blocks as lanes: v[i] holds |x| of blocks 2i and 2i + 1 (kBlock 16), or of block i (32).
template <int kBlock>
MXMOE_INLINE u32 block_maxima(const u16x32* v) {
  u16x32 halves[8], quarters[4];
  for (int i = 0; i < 8; ++i) {
    if constexpr (kBlock == 16) {
      halves[i] = v[i];
    } else {
      __m512i a = (__m512i)v[2 * i], b = (__m512i)v[2 * i + 1];
      halves[i] = max16((u16x32)_mm512_shuffle_i64x2(a, b, 0x44), (u16x32)_mm512_shuffle_i64x2(a, b, 0xee));
    }
  }
  for (int i = 0; i < 4; ++i) {  // 128 bits of blocks 4i to 4i + 3
    __m512i a = (__m512i)halves[2 * i], b = (__m512i)halves[2 * i + 1];
    quarters[i] = max16((u16x32)_mm512_shuffle_i64x2(a, b, 0x88), (u16x32)_mm512_shuffle_i64x2(a, b, 0xdd));
  }
  auto fold64 = [](u16x32 a, u16x32 b) {
    return (__m512)max16((u16x32)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b),
                         (u16x32)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b));
  };
  __m512 a = fold64(quarters[0], quarters[1]), b = fold64(quarters[2], quarters[3]);
  u32 m = (u32)max16((u16x32)_mm512_shuffle_ps(a, b, 0x88), (u16x32)_mm512_shuffle_ps(a, b, 0xdd));
  u32 high = m >> 16, low = m & 0xffffu;
  u32 transposed = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return (u32)_mm512_permutexvar_epi32((__m512i)transposed, (__m512i)max_u32(high, low));
}

// Scale bytes from amaxes in BF16: amax / kMax rounds up to the exponents' difference, and one more where amax's
// mantissa is beyond that of kMax. V: lanes of any width.
template <typename E, typename V>
MXMOE_INLINE V scales_of_bf16(V amax, bool floor) {
  constexpr int kMantissa = static_cast<int>((E::kMax / power_of_two(E::kMaxExponent) - 1.0f) * 128.0f);
  V exponent = (floor ? amax : amax + (127 - kMantissa)) >> 7;
  V scale = exponent > E::kMaxExponent ? exponent - E::kMaxExponent : V{};
  return amax < 0x7f80 ? scale : V{} + 255;
}

// A smaller scale makes codes of BF16's own subnormals.
template <typename E>
constexpr uint32_t kRareBelow = E::kBias + E::kMantissa + 1;

// 8-bit elements with a power-of-two scale. `smallest` (one per lane) is the least magnitude of a normal element,
// `offset` what its code subtracts.
template <typename E>
struct Coder8 {
  static constexpr int kDrop = 7 - E::kMantissa, kLeft = 8 - kDrop;
  static constexpr uint16_t kLast = 1 << kDrop, kBelowHalf = ((1 << (kDrop - 1)) - 1) << kLeft;

  // V: lanes of 16 bits or more.
  template <typename V>
  MXMOE_INLINE V smallest_of(V scale) {
    return (scale - (E::kBias - 1)) << 7;
  }
  template <typename V>
  MXMOE_INLINE V offset_of(V smallest) {
    return ((smallest - 128) << kLeft) - kBelowHalf;
  }

  // The codes of 64 elements that are zero or not below 2^-126. Rounding to nearest even happens on the value moved up
  // to the high byte of its lane: what is added and dropped lies below that.
  MXMOE_INLINE __m512i encode(const u16x32 (&x)[2], const u16x32 (&smallest)[2], const u16x32 (&offset)[2],
                              bool saturate) {
    u16x32 magnitude[2], code[2];
    __mmask32 tiny[2];
    for (int i = 0; i < 2; ++i) {
      magnitude[i] = x[i] & 0x7fff;
      if (saturate) {
        const u16x32 most = smallest[i] + static_cast<uint16_t>((E::kMaxCode << kDrop) - 128);
        magnitude[i] = magnitude[i] < most ? magnitude[i] : most;
      }
      const u16x32 even = (magnitude[i] & kLast) >> (kDrop - kLeft);
      code[i] = (magnitude[i] << kLeft) + even - offset[i];
      tiny[i] = _mm512_cmplt_epu16_mask((__m512i)magnitude[i], (__m512i)smallest[i]);
    }
    if (__builtin_expect((tiny[0] | tiny[1]) != 0, 0))
      for (int i = 0; i < 2; ++i)
        code[i] = (u16x32)_mm512_mask_mov_epi16((__m512i)code[i], tiny[i],
                                                (__m512i)encode_tiny(magnitude[i], smallest[i] - 128));
    constexpr int kSelect = 0xca;  // bits of x where the first operand has ones
    for (int i = 0; i < 2; ++i)
      code[i] = (u16x32)_mm512_ternarylogic_epi32(_mm512_set1_epi16(static_cast<short>(0x8000)), (__m512i)x[i],
                                                  (__m512i)code[i], kSelect);
    return pack(code[0], code[1]);
  }

  // Subnormal elements: the 8-bit significand shifted down to the grid; rebase is (scale - bias) in the exponent's
  // place.
  MXMOE_INLINE u16x32 encode_tiny(u16x32 magnitude, u16x32 rebase) {
    i16x32 wanted = static_cast<int16_t>(kDrop + 1) - ((i16x32)(magnitude - rebase) >> 7);
    wanted = wanted > 1 ? wanted : i16x32{} + 1;  // zeros, under any scale
    u16x32 shift = (u16x32)(wanted < 15 ? wanted : i16x32{} + 15);
    u16x32 significand = (magnitude & 0x7f) | 0x80;
    significand = magnitude < 0x80 ? u16x32{} : significand;
    u16x32 half = (u16x32{} + 1) << (shift - 1);
    return ((significand + half - 1 + ((significand >> shift) & 1)) >> shift) << 8;
  }

  // The codes of 64 elements.
  MXMOE_INLINE __m512i pack(u16x32 low, u16x32 high) {
    alignas(64) static constexpr auto kOdd = [] {
      struct {
        uint8_t byte[64];
      } index{};
      for (int i = 0; i < 64; ++i) index.byte[i] = static_cast<uint8_t>(2 * i + 1);
      return index;
    }();
    return _mm512_permutex2var_epi8((__m512i)low, _mm512_load_si512(&kOdd), (__m512i)high);
  }
};

// Any block, by way of FP32.
template <typename E>
static __attribute__((noinline)) void encode_bf16_rare(const uint16_t* x, uint32_t scale, uint8_t* codes) {
  if (scale == 255) {
    memset(codes, E::kPoison, 32);
    return;
  }
  const f32 factor = splat(f32_of(e8m0_inverse_bits(scale)));
  for (int i = 0; i < 32; i += kLanes) {
    u32 b = bits(f32_from_bf16(load<u16h>(x + i)) * factor);
    store(codes + i,
          narrow8(encode_nearest<E, f32, u32>(b & 0x7fffffffu) | (b >> (32 - E::kBits) & 1u << (E::kBits - 1))));
  }
}

// Lanes whose blocks are rare: another scale, but for blocks of zeros.
template <typename E>
MXMOE_INLINE __mmask16 rare_blocks(u32 amax, u32 scale) {
  return (_mm512_cmplt_epu32_mask((__m512i)scale, _mm512_set1_epi32(kRareBelow<E>)) &
          _mm512_test_epi32_mask((__m512i)amax, (__m512i)amax)) |
         _mm512_cmpeq_epi32_mask((__m512i)scale, _mm512_set1_epi32(255));
}
template <typename E>
MXMOE_INLINE __mmask32 rare_blocks(u16x32 amax, u16x32 scale) {
  return (_mm512_cmplt_epu16_mask((__m512i)scale, (__m512i)splat16(kRareBelow<E>)) &
          _mm512_test_epi16_mask((__m512i)amax, (__m512i)amax)) |
         _mm512_cmpeq_epi16_mask((__m512i)scale, (__m512i)splat16(255));
}

MXMOE_INLINE void put(uint8_t* to, __m512i v, bool stream) {
  if (stream)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), v);
  else
    memcpy(to, &v, sizeof(v));
}

// count <= 16 blocks of 32 of a row copy. `ahead`: elements from x to what will be read some hundred cycles later;
// where hardware prefetches alone, rows run at 60 % of their rate.
template <typename E>
MXMOE_INLINE void quantize_bf16_group(const uint16_t* x, int64_t ahead, int count, bool floor, bool stream,
                                      uint8_t* values, uint8_t* scales, uint16_t* column_amaxes) {
  u16x32 magnitudes[kGroupBlocks];
  for (int k = 0; k < kGroupBlocks; ++k) {
    __builtin_prefetch(x + ahead + 32 * k);
    magnitudes[k] = k < count ? load32(x + 32 * k) & 0x7fff : u16x32{};
    if (column_amaxes && k < count) {
      u16x32 most = max16(load32(column_amaxes + 32 * k), magnitudes[k]);
      memcpy(column_amaxes + 32 * k, &most, sizeof(most));
    }
  }
  const u32 amax = block_maxima<32>(magnitudes), scale = scales_of_bf16<E, u32>(amax, floor);
  const u8q bytes = narrow8(scale);
  memcpy(scales, &bytes, count);
  alignas(64) uint32_t smallest[kGroupBlocks], offset[kGroupBlocks];
  auto in_both_halves = [](u32 v) { return (v & 0xffffu) | v << 16; };
  store(smallest, in_both_halves(Coder8<E>::smallest_of(scale)));
  store(offset, in_both_halves(Coder8<E>::offset_of(Coder8<E>::smallest_of(scale))));
  auto of_block = [](const uint32_t* v, int k) { return (u16x32)_mm512_set1_epi32(static_cast<int>(v[k])); };
  const u16x32 none{};
  int k = 0;
  for (; k + 2 <= count; k += 2)
    put(values + 32 * k,
        Coder8<E>::encode({load32(x + 32 * k), load32(x + 32 * k + 32)},
                          {of_block(smallest, k), of_block(smallest, k + 1)},
                          {of_block(offset, k), of_block(offset, k + 1)}, floor),
        stream);
  if (k < count) {
    const __m512i v = Coder8<E>::encode({load32(x + 32 * k), none}, {of_block(smallest, k), none},
                                        {of_block(offset, k), none}, floor);
    memcpy(values + 32 * k, &v, 32);
  }
  for (uint32_t rare = rare_blocks<E>(amax, scale) & ((1u << count) - 1); __builtin_expect(rare != 0, 0);
       rare &= rare - 1) {
    k = __builtin_ctz(rare);
    encode_bf16_rare<E>(x + 32 * k, bytes[k], values + 32 * k);
  }
}

template <typename E>
static void quantize_bf16_row(const uint16_t* x, int64_t ahead, int64_t num_blocks, bool floor, bool stream,
                              uint8_t* values, uint8_t* scales, uint16_t* column_amaxes) {
  auto group = [&](int64_t k, int count) __attribute__((always_inline)) {
    quantize_bf16_group<E>(x + 32 * k, ahead, count, floor, stream, values + 32 * k, scales + k,
                           column_amaxes ? column_amaxes + 32 * k : nullptr);
  };
  int64_t k = 0;
  for (; k + kGroupBlocks <= num_blocks; k += kGroupBlocks) group(k, kGroupBlocks);
  if (k < num_blocks) group(k, static_cast<int>(num_blocks - k));
}

// max |x| of `cols` columns, over `rows` rows as they lie in memory.
static inline void amax_bf16_columns(const uint16_t* x, int64_t x_stride, int64_t ahead, int rows, int cols,
                                     uint16_t* amaxes) {
  constexpr int kRowsAtOnce = 4;
  for (int i = 0; i < rows; i += kRowsAtOnce)
    for (int c = 0; c < cols; c += 32) {
      u16x32 amax = load32(amaxes + c);
      for (int j = i; j < i + kRowsAtOnce && j < rows; ++j) {
        __builtin_prefetch(x + j * x_stride + ahead + c);
        amax = max16(amax, load32(x + j * x_stride + c) & 0x7fff);
      }
      memcpy(amaxes + c, &amax, sizeof(amax));
    }
}

// The blocks of `cols` (a multiple of 32) columns of a column copy: valid (<= 32) rows of x, rows_to_write of values,
// the rest of them zero; scales[c].
template <typename E>
static void quantize_bf16_columns(const uint16_t* x, int64_t x_stride, const uint16_t* amaxes, int valid,
                                  int rows_to_write, int cols, bool floor, bool stream, uint8_t* values,
                                  int64_t values_stride, uint8_t* scales) {
  alignas(64) uint16_t smallest[kMaxStripCols], offset[kMaxStripCols];
  const u16x32 none{};
  uint32_t rare[kMaxStripCols / 32];
  for (int c = 0; c < cols; c += 32) {
    const u16x32 amax = load32(amaxes + c), scale = scales_of_bf16<E, u16x32>(amax, floor);
    const u16x32 least = Coder8<E>::smallest_of(scale), subtracted = Coder8<E>::offset_of(least);
    memcpy(smallest + c, &least, sizeof(least)), memcpy(offset + c, &subtracted, sizeof(subtracted));
    const __m256i bytes = _mm512_cvtepi16_epi8((__m512i)scale);
    memcpy(scales + c, &bytes, sizeof(bytes));
    rare[c / 32] = rare_blocks<E>(amax, scale);
  }
  for (int i = 0; i < rows_to_write; ++i) {
    uint8_t* to = values + i * values_stride;
    const uint16_t* from = x + i * x_stride;
    int c = 0;
    if (i >= valid) {
      for (; c + 64 <= cols; c += 64) put(to + c, _mm512_setzero_si512(), stream);
      memset(to + c, 0, cols - c);
      continue;
    }
    for (; c + 64 <= cols; c += 64)
      put(to + c,
          Coder8<E>::encode({load32(from + c), load32(from + c + 32)},
                            {load32(smallest + c), load32(smallest + c + 32)},
                            {load32(offset + c), load32(offset + c + 32)}, floor),
          stream);
    if (c < cols) {
      const __m512i v =
          Coder8<E>::encode({load32(from + c), none}, {load32(smallest + c), none}, {load32(offset + c), none}, floor);
      memcpy(to + c, &v, 32);
    }
  }
  for (int first = 0; first < cols; first += 32)
    for (uint32_t lanes = rare[first / 32]; __builtin_expect(lanes != 0, 0); lanes &= lanes - 1) {
      const int c = first + __builtin_ctz(lanes);
      uint16_t column[32] = {};
      uint8_t codes[32];
      for (int i = 0; i < valid; ++i) column[i] = x[i * x_stride + c];
      encode_bf16_rare<E>(column, scales[c], codes);
      for (int i = 0; i < valid; ++i) values[i * values_stride + c] = codes[i];
    }
}

}  // namespace mxmoe::host::MXMOE_ISA
#endif
