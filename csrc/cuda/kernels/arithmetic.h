// exp and sigmoid of the numerics contract: FP32, one rounding per operation (compiled with -fmad=false).
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

template <class M, class F>
MXMOE_KERNEL F sigmoid(M& m, F x) {
  return m.divide(m.splat(1.0f), exp(m, -x) + 1.0f);
}

}  // namespace mxmoe::cuda
