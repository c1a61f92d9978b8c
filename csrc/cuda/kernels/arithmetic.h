// exp, log, sigmoid and ordered sums of the numerics contract: FP32, one rounding per operation (compiled with
// -fmad=false).
#pragma once
#include <cstdint>

#include "cuda/tile/types.h"

namespace mxmoe::cuda {

// Cody and Waite's reduction, the polynomial of Cephes' expf.
template <class M, class F>
MXMOE_KERNEL F exp(M&, F x) {
  using U = typename M::template lane<uint32_t>;
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, which the low bits then hold
  const F shifted = x * 1.44269504f + kRound, n = shifted - kRound;
  const F r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  F y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = ((y * r) * r + r) + 1.0f;
  y = __builtin_bit_cast(F, __builtin_bit_cast(U, y) + (__builtin_bit_cast(U, shifted) << 23));  // times 2^n
  y = x < -87.0f ? F{} : y;
  y = x > 88.7f ? F{} + __builtin_inff() : y;
  return x == x ? y : x;
}

// Natural logarithm of a normal positive x = y * 2^e, y in [sqrt(1/2), sqrt(2)); the polynomial of Cephes' logf.
template <class M, class F>
MXMOE_KERNEL F log(M& m, F x) {
  using U = typename M::template lane<uint32_t>;
  const U bits = __builtin_bit_cast(U, x), mantissa = bits & 0x7fffffu;
  const auto small = mantissa < 0x3504f3u;  // y in [1, sqrt(2)) keeps its exponent, the rest is halved
  const U power = (bits >> 23) - (small ? U{} + 127u : U{} + 126u);
  const F e = m.template cast<float>(__builtin_bit_cast(typename M::template lane<int>, power));
  const F f = __builtin_bit_cast(F, mantissa | (small ? U{} + 0x3f800000u : U{} + 0x3f000000u)) - 1.0f, square = f * f;
  F p = f * 7.0376836292e-2f + -1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f + -1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f + -1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f + -2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const F y = ((p * f) * square + e * -2.12194440e-4f) - square * 0.5f;
  return x == x ? (f + y) + e * 0.693359375f : x;
}

// Word i of stochastic rounding (Philox4x32-10, see formats.h): i by lane, 64 bits.
template <class M, class I>
MXMOE_KERNEL auto random_word(M& m, uint64_t seed, I i, uint32_t copy) {
  using U = typename M::template lane<uint32_t>;
  const I block = i >> 2;
  U c0 = m.template cast<uint32_t>(block), c1 = m.template cast<uint32_t>(block >> 32), c2 = m.splat(copy), c3 = {};
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9u, k1 += 0xbb67ae85u) {
    const U high0 = m.mul_hi(c0, 0xd2511f53u), high2 = m.mul_hi(c2, 0xcd9e8d57u);
    const U low0 = c0 * 0xd2511f53u, low2 = c2 * 0xcd9e8d57u;
    c0 = high2 ^ c1 ^ k0, c1 = low2, c2 = high0 ^ c3 ^ k1, c3 = low0;
  }
  const U word = m.template cast<uint32_t>(i) & 3u;
  return word < 2u ? (word == 0u ? c0 : c1) : (word == 2u ? c2 : c3);
}

// The last step of a sum over the contract's 32 lanes: a tree.
template <class M, class F>
MXMOE_KERNEL F sum_of_lanes(M& m, F x) {
  for (int half = 16; half; half /= 2) x = x + m.shfl_xor(x, half);
  return x;
}

template <class M, class F>
MXMOE_KERNEL F sigmoid(M& m, F x) {
  return m.divide(m.splat(1.0f), exp(m, -x) + 1.0f);
}

}  // namespace mxmoe::cuda
