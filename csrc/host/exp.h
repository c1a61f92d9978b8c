// exp, log and sigmoid of the numerics contract: FP32, one rounding per operation, the same bits on every instruction
// set.
#pragma once
#include "host/simd.h"

namespace mxmoe::host::MXMOE_ISA {

MXMOE_INLINE f32 exp(f32 x) {
  const float kRound =
      0x1.8p23f;  // adding it rounds to an integer, to nearest even, and leaves the integer in the low bits
  f32 shifted = x * 1.44269504f + kRound;
  f32 n = shifted - kRound;
  f32 r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  f32 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  f32 y = ((p * r) * r + r) + 1.0f;
  y = from_bits(bits(y) + (bits(shifted) << 23));  // times 2^n; the result is normal
  if (__builtin_expect(!any_above(bits(x) & 0x7fffffffu, bits_of(87.0f)), 1)) return y;
  y = x < -87.0f ? splat(0.0f) : y;
  y = x > 88.7f ? splat(__builtin_inff()) : y;
  return x == x ? y : x;
}

// Of a normal positive x = m * 2^e, m in [sqrt(1/2), sqrt(2)); NaN stays NaN.
MXMOE_INLINE f32 log(f32 x) {
  u32 mantissa = bits(x) & 0x7fffffu;
  auto small = mantissa < 0x3504f3u;  // m in [1, sqrt(2)) keeps its exponent, the rest is halved
  u32 one = splat_u32(0x3f800000u), half = splat_u32(0x3f000000u), bias = splat_u32(127), bias_half = splat_u32(126);
  f32 e = __builtin_convertvector((i32)((bits(x) >> 23) - (small ? bias : bias_half)), f32);
  f32 f = from_bits(mantissa | (small ? one : half)) - 1.0f;
  f32 square = f * f;
  f32 p = splat(7.0376836292e-2f);
  p = p * f + -1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f + -1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f + -1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f + -2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  f32 y = ((p * f) * square + e * -2.12194440e-4f) - square * 0.5f;
  return x == x ? (f + y) + e * 0.693359375f : x;
}

MXMOE_INLINE f32 sigmoid(f32 x) {
  return 1.0f / (1.0f + exp(-x));
}

MXMOE_INLINE float log(float x) {
  return log(splat(x))[0];
}

// A sum whose order is fixed: lane j of 32 adds elements j, j + 32, ... in order, then a tree 16, 8, 4, 2, 1.
struct LaneSum {
  static constexpr int kWidth = 32, kVectors = kWidth / kLanes;
  f32 lanes[kVectors] = {};

  MXMOE_INLINE float tree(const LaneSum& sum) {
    float v[kWidth];
    for (int i = 0; i < kVectors; ++i) store(v + i * kLanes, sum.lanes[i]);
    for (int half = kWidth / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) v[i] = v[i] + v[i + half];
    return v[0];
  }
};

}  // namespace mxmoe::host::MXMOE_ISA
