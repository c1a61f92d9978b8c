// The routing weights' gradient of unpermute: weights_grad[slot] = dot(dy[slot / top_k], y[n]), slot = permutation[n].
// Slots without a row are not written.
//
// A warp takes a row. The order of the sum is the contract's: lane j adds elements j, j + 32, ..., then a tree.
#pragma once
#include "cuda/kernels/arithmetic.h"
#include "cuda/kernels/elements.h"
#include "cuda/launch.h"
#include "layout.h"

namespace mxmoe::cuda::weights_grad {

template <Input kGradientType, Input kOutputType>
struct config {
  static constexpr Input kGradient = kGradientType, kOutput = kOutputType;  // types of dy and of y
  static constexpr int kWarps = 4;
};

struct shared {};

template <class M>
struct globals {
  const uint8_t *dy, *y;
  int64_t dy_row_bytes, y_row_bytes;
  const int32_t* permutation;
  float* out;
  int rows, top_k, length;
};

// One element of each lane; zero where `inside` is false.
template <Input kInput, class M, class I, class P>
MXMOE_KERNEL auto load_float(M& m, const void* base, I index, P inside) {
  using Element = std::conditional_t<kInput == Input::kF32, uint32_t, uint16_t>;
  const auto word = m.template ld_global<Element>(base, index * bytes_of(kInput), inside);
  return to_float<kInput, 0>(m, m.template cast<uint32_t>(word));
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using F = typename M::template lane<float>;
  m.role("weights_grad");
  const int row = m.cta_idx() * C::kWarps + m.warp_idx();
  const int slot = row < g.rows ? m.ld_global_uniform(g.permutation + row) : -1;
  if (slot < 0) return;
  F sum = {};
  for (int column = 0; column < g.length; column += 32) {
    const auto index = m.lane_idx() + column;
    const auto inside = index < g.length;
    sum = sum + load_float<C::kGradient>(m, g.dy + int64_t{slot / g.top_k} * g.dy_row_bytes, index, inside) *
                    load_float<C::kOutput>(m, g.y + row * g.y_row_bytes, index, inside);
  }
  m.template st_global<float>(g.out + slot, m.lane_idx() * 4, sum_of_lanes(m, sum), m.elect_one());
}

MXMOE_LAUNCHABLE("weights_grad", shared)

// dy (T, D), y (N, D); permutation (N,); out FP32 (T, K).
template <class L>
void launch(L& l, const Tensor& dy, const Tensor& y, const Tensor& permutation, int64_t top_k, const Tensor& out) {
  globals<typename L::machine> g{};
  g.dy = dy.ptr<uint8_t>(), g.y = y.ptr<uint8_t>();
  g.dy_row_bytes = dy.strides[0] * bytes_of(dy.dtype), g.y_row_bytes = y.strides[0] * bytes_of(y.dtype);
  g.permutation = permutation.ptr<int32_t>(), g.out = out.ptr<float>();
  g.rows = static_cast<int>(permutation.sizes[0]), g.top_k = static_cast<int>(top_k);
  g.length = static_cast<int>(dy.sizes[1]);
  with_input(dy.dtype, [&]<Input kGradient>() {
    with_input(y.dtype, [&]<Input kOutput>() {
      using C = config<kGradient, kOutput>;
      l.template run<launchable<C>>(
          ceil_div(g.rows, C::kWarps), g,
          {{"dy", dy}, {"y", y}, {"permutation", permutation}, {"weights_grad", out, Use::kWritten}});
    });
  });
}

}  // namespace mxmoe::cuda::weights_grad
