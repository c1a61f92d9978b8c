// exp, log and sigmoid of the numerics contract: FP32, one rounding per operation, the same bits on every instruction
// set.
#pragma once
#include <initializer_list>

#include "host/simd.h"

namespace mxmoe::host::MXMOE_ISA {

// Of N vectors side by side: a step waits for the one before it, so that one vector alone takes twice as long.
template <int N>
MXMOE_INLINE void exp(f32 (&x)[N]) {
  const float kRound =
      0x1.8p23f;  // adding it rounds to an integer, to nearest even, and leaves the integer in the low bits
  f32 shifted[N], n[N], r[N], y[N];
  side_by_side(shifted, [&](int i) { return x[i] * 1.44269504f; });
  side_by_side(shifted, [&](int i) { return shifted[i] + kRound; });
  side_by_side(n, [&](int i) { return shifted[i] - kRound; });
  side_by_side(r, [&](int i) { return minus_exact_product(x[i], n[i], 0.693359375f); });  // 8 bits times 9
  side_by_side(r, [&](int i) { return r[i] - n[i] * -2.12194440e-4f; });
  side_by_side(y, [&](int i) { return r[i] * 1.9875691500e-4f + 1.3981999507e-3f; });
  for (float c : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    side_by_side(y, [&](int i) { return y[i] * r[i]; });
    side_by_side(y, [&](int i) { return y[i] + c; });
  }
  side_by_side(y, [&](int i) { return y[i] * r[i]; });
  side_by_side(y, [&](int i) { return y[i] * r[i]; });
  side_by_side(y, [&](int i) { return y[i] + r[i]; });
  side_by_side(y, [&](int i) { return y[i] + 1.0f; });
  side_by_side(y, [&](int i) { return from_bits(bits(y[i]) + (bits(shifted[i]) << 23)); });  // times 2^n; normal
  u32 most = bits(x[0]) & 0x7fffffffu;
  for (int i = 1; i < N; ++i) most = max_u32(most, bits(x[i]) & 0x7fffffffu);
  if (__builtin_expect(any_above(most, bits_of(87.0f)), 0)) {
    for (int i = 0; i < N; ++i) {
      y[i] = x[i] < -87.0f ? splat(0.0f) : y[i];
      y[i] = x[i] > 88.7f ? splat(__builtin_inff()) : y[i];
      y[i] = x[i] == x[i] ? y[i] : x[i];
    }
  }
  for (int i = 0; i < N; ++i) x[i] = y[i];
}

MXMOE_INLINE f32 exp(f32 x) {
  f32 one[1] = {x};
  exp(one);
  return one[0];
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

template <int N>
MXMOE_INLINE void sigmoid(f32 (&x)[N]) {
  for (int i = 0; i < N; ++i) x[i] = -x[i];
  exp(x);
  for (int i = 0; i < N; ++i) x[i] = 1.0f / (1.0f + x[i]);
}

MXMOE_INLINE float log(float x) {
  return log(splat(x))[0];
}

// A sum whose order is fixed: lane j of 32 adds elements j, j + 32, ... in order, then a tree 16, 8, 4, 2, 1.
struct LaneSum {
  static constexpr int kWidth = 32, kVectors = kWidth / kLanes;
  f32 lanes[kVectors] = {};

  MXMOE_INLINE float tree(LaneSum sum) {
    for (int half = kVectors / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) sum.lanes[i] = sum.lanes[i] + sum.lanes[i + half];
    f32 v = sum.lanes[0];
    for (int half = kLanes / 2; half; half /= 2) {  // lane 0 is the tree's
      i32 other = (lane_indices() + half) & (kLanes - 1);
      v = v + __builtin_shuffle(v, other);
    }
    return v[0];
  }
};

}  // namespace mxmoe::host::MXMOE_ISA
