// Facts of the number formats, as constexpr functions for host and device. docs/numerics.md is the contract.
//
// The rounding functions are templates over (F, U) = (float, uint32_t) or vectors of them, so that one text serves
// scalar code, every vector width and device code. They take the bits of a magnitude (sign cleared) and give a code
// without its sign.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define MXMOE_FACT __host__ __device__ static constexpr
#else
#define MXMOE_FACT __attribute__((always_inline)) static constexpr
#endif

namespace mxmoe {

enum class Format : uint8_t { kMxfp8, kMxfp8E5m2, kMxfp4, kNvfp4 };
enum class Scope : uint8_t { kRow, kTensor, kGroup };  // what shares one NVFP4 global scale

// kMaxExponent: floor(log2(kMax)). kPoison: what every element of a block with a NaN or Inf becomes.
struct E4M3 {
  static constexpr int kBits = 8, kMantissa = 3, kBias = 7, kMaxExponent = 8;
  static constexpr uint32_t kMaxCode = 0x7e, kPoison = 0x7f;
  static constexpr float kMax = 448.0f;
};
struct E5M2 {
  static constexpr int kBits = 8, kMantissa = 2, kBias = 15, kMaxExponent = 15;
  static constexpr uint32_t kMaxCode = 0x7b, kPoison = 0x7f;
  static constexpr float kMax = 57344.0f;
};
struct E2M1 {
  static constexpr int kBits = 4, kMantissa = 1, kBias = 1, kMaxExponent = 2;
  static constexpr uint32_t kMaxCode = 0x7, kPoison = 0x0;
  static constexpr float kMax = 6.0f;
};

template <Format kFormat>
struct FormatFacts;
template <>
struct FormatFacts<Format::kMxfp8> {
  using Element = E4M3;
  static constexpr int kBlock = 32;
  static constexpr bool kGlobalScale = false;
};
template <>
struct FormatFacts<Format::kMxfp8E5m2> {
  using Element = E5M2;
  static constexpr int kBlock = 32;
  static constexpr bool kGlobalScale = false;
};
template <>
struct FormatFacts<Format::kMxfp4> {
  using Element = E2M1;
  static constexpr int kBlock = 32;
  static constexpr bool kGlobalScale = false;
};
template <>
struct FormatFacts<Format::kNvfp4> {
  using Element = E2M1;
  static constexpr int kBlock = 16;
  static constexpr bool kGlobalScale = true;
};

MXMOE_FACT int block_of(Format f) {
  return f == Format::kNvfp4 ? 16 : 32;
}
MXMOE_FACT int bits_of_element(Format f) {
  return f == Format::kMxfp8 || f == Format::kMxfp8E5m2 ? 8 : 4;
}

// NVFP4: global scale = amax / kNvfp4Amax, so that the largest block scale is 448 (256 with four_six, which leaves room
// for * 6/4).
static constexpr float kNvfp4Amax = 2688.0f;         // 448 * 6
static constexpr float kNvfp4FourSixAmax = 1536.0f;  // 256 * 6
static constexpr uint8_t kNvfp4Poison = 0x7f;        // block scale where the scope holds a NaN or Inf
static constexpr uint32_t kInfBits = 0x7f800000u, kNanBits = 0x7fc00000u;

MXMOE_FACT float power_of_two(int e) {  // e in [-126, 127]
  return __builtin_bit_cast(float, static_cast<uint32_t>(e + 127) << 23);
}

// Round to nearest even, saturating. The subnormal part lets one FP32 addition do the rounding: adding 2^(24 - kBias -
// kMantissa) aligns the element grid with the last mantissa bit.
template <typename E, typename F = float, typename U = uint32_t>
MXMOE_FACT U encode_nearest(U magnitude) {
  constexpr int kDrop = 23 - E::kMantissa;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - E::kBias) << E::kMantissa;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - E::kBias) << 23;
  constexpr float kAlign = power_of_two(24 - E::kBias - E::kMantissa);
  U normal = ((magnitude + ((1u << (kDrop - 1)) - 1u) + ((magnitude >> kDrop) & 1u)) >> kDrop) - kRebias;
  U subnormal = __builtin_bit_cast(U, __builtin_bit_cast(F, magnitude) + kAlign) - __builtin_bit_cast(uint32_t, kAlign);
  U code = magnitude < kSmallestNormal ? subnormal : normal;
  return code < E::kMaxCode ? code : U{} + E::kMaxCode;
}

// Stochastic: the magnitude on the element grid in fixed point with 24 fraction bits, plus 24 random bits, fraction
// dropped.
template <typename E, typename U = uint32_t>
MXMOE_FACT U encode_stochastic(U magnitude, U random) {
  constexpr uint32_t kFirst = 128 - E::kBias;  // exponent field of the smallest normal element
  U exponent = magnitude >> 23;
  U significand = (magnitude & 0x7fffffu) | (exponent > 0u ? U{} + 0x800000u : U{});
  U field = exponent > kFirst ? exponent : U{} + kFirst;
  U below = field - exponent;  // subnormal FP32 values are off by one here, but far below the grid
  U fixed = (significand << (E::kMantissa + 1)) >> (below < 31u ? below : U{} + 31u);
  U code = ((field - kFirst) << E::kMantissa) + ((fixed + (random >> 8)) >> 24);
  return code < E::kMaxCode ? code : U{} + E::kMaxCode;
}

// E8M0 scale byte of a block from the bits of its amax; 255 where the block holds a NaN or Inf.
template <typename E, typename F = float, typename U = uint32_t>
MXMOE_FACT U scale_rceil(U amax) {
  U q = __builtin_bit_cast(U, __builtin_bit_cast(F, amax) * (1.0f / E::kMax));
  U scale = q > 0x400000u ? (q + 0x7fffffu) >> 23 : U{};
  return amax < kInfBits ? scale : U{} + 255u;
}
template <typename E, typename U = uint32_t>
MXMOE_FACT U scale_floor(U amax) {
  U exponent = amax >> 23;
  U scale = exponent > static_cast<uint32_t>(E::kMaxExponent) ? exponent - E::kMaxExponent : U{};
  return amax < kInfBits ? scale : U{} + 255u;
}

// Bits of 2^(b - 127) and of 2^(127 - b); b = 255 gives a NaN and, for the inverse, an unused value.
template <typename U = uint32_t>
MXMOE_FACT U e8m0_bits(U b) {
  U power = b > 0u ? b << 23 : U{} + 0x400000u;
  return b < 255u ? power : U{} + kNanBits;
}
template <typename U = uint32_t>
MXMOE_FACT U e8m0_inverse_bits(U b) {
  return b < 254u ? (254u - b) << 23 : U{} + 0x400000u;
}

// Bits of the FP32 value of a code without sign: moved into FP32's fields, then scaled by the difference of the biases.
template <typename E, typename F = float, typename U = uint32_t>
MXMOE_FACT U decode_magnitude(U code) {
  U aligned = code << (23 - E::kMantissa);
  U value = __builtin_bit_cast(U, __builtin_bit_cast(F, aligned) * power_of_two(127 - E::kBias));
  if constexpr (E::kMaxCode == E4M3::kMaxCode) return code == 0x7fu ? U{} + kNanBits : value;
  if constexpr (E::kMaxCode == E5M2::kMaxCode) {
    U special = code == 0x7cu ? U{} + kInfBits : U{} + kNanBits;
    return code < 0x7cu ? value : special;
  }
  return value;
}

// Hadamard rotation over 16 elements: bit i set = element i is negated first; the butterflies follow, then * 0.25.
static constexpr uint32_t kHadamardSigns = 0x5c2bu;
static constexpr int kHadamardSize = 16;
static constexpr float kHadamardScale = 0.25f;

// Philox4x32-10 (Salmon et al., SC 2011). Stochastic rounding of element i of the logical tensor (of the group, where
// there are groups) takes word i & 3 of the block with counter (i >> 2 low, i >> 2 high, copy id, 0) and key = seed
// (low, high).
static constexpr uint32_t kPhiloxRowCopy = 0, kPhiloxColumnCopy = 1;
struct Philox {
  uint32_t word[4];
};
MXMOE_FACT Philox philox(uint64_t seed, uint64_t counter, uint32_t copy) {
  Philox c{{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), copy, 0}};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = uint64_t{0xd2511f53u} * c.word[0], p1 = uint64_t{0xcd9e8d57u} * c.word[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ k0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ k1, static_cast<uint32_t>(p0)}};
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  return c;
}

}  // namespace mxmoe
