// unpermute: out[t] = sum over k ascending of weights[t, k] * y[inverse[t, k]] in FP32, rounded once; a slot without a
// row adds nothing.
//
// A warp takes a token, four elements a lane at a time.
#pragma once
#include "cuda/kernels/elements.h"
#include "cuda/launch.h"
#include "layout.h"

namespace mxmoe::cuda::unpermute {

template <Input kInputType, Input kOutputType>
struct config {
  static constexpr Input kInput = kInputType, kOutput = kOutputType;
  static constexpr int kWarps = 4, kStep = 128;
};

struct shared {};

template <class M>
struct globals {
  const uint8_t* y;
  int64_t y_row_bytes;
  const int32_t* inverse;  // (tokens, top_k)
  const float* weights;    // (tokens, top_k), or null: 1
  uint8_t* out;
  int64_t out_row_bytes;
  int tokens, top_k, length;
  bool y_aligned, out_aligned;
};

template <class C, class M>
MXMOE_KERNEL void sum_token(M& m, const globals<M>& g, int token) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  for (int column = 0; column < g.length; column += C::kStep) {
    const auto first = m.lane_idx() * 4 + column;
    F total[4] = {};
    for (int k = 0; k < g.top_k; ++k) {
      const int64_t slot = int64_t{token} * g.top_k + k;
      const int row = m.ld_global_uniform(g.inverse + slot);
      if (row < 0) continue;
      U words[bytes_of(C::kInput)];
      F x[4];
      load_words<bytes_of(C::kInput)>(m, g.y + row * g.y_row_bytes, first, g.length, g.y_aligned, true, words);
      to_floats<C::kInput>(m, words, x);
      const float weight = g.weights ? m.ld_global_uniform(g.weights + slot) : 1.0f;
      for (int j = 0; j < 4; ++j) total[j] = total[j] + (g.weights ? x[j] * weight : x[j]);
    }
    U words[bytes_of(C::kOutput)];
    from_floats<C::kOutput>(m, total, words);
    store_words<bytes_of(C::kOutput)>(m, g.out + token * g.out_row_bytes, first, g.length, g.out_aligned, true, words);
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  m.role("unpermute");
  const int token = m.cta_idx() * C::kWarps + m.warp_idx();
  if (token < g.tokens) sum_token<C>(m, g, token);
}

MXMOE_LAUNCHABLE("unpermute", shared)

template <class M>
globals<M> globals_of(const Tensor& y, const Tensor& inverse, const Tensor& weights, const Tensor& out) {
  globals<M> g{};
  g.y = y.ptr<uint8_t>(), g.y_row_bytes = y.strides[0] * bytes_of(y.dtype), g.y_aligned = in_fours(y);
  g.inverse = inverse.ptr<int32_t>(), g.weights = weights.ptr<float>();
  g.out = out.ptr<uint8_t>(), g.out_row_bytes = out.strides[0] * bytes_of(out.dtype), g.out_aligned = in_fours(out);
  g.tokens = static_cast<int>(out.sizes[0]), g.top_k = static_cast<int>(inverse.sizes[1]);
  g.length = static_cast<int>(out.sizes[1]);
  return g;
}

// y (N, D); inverse int32 and weights FP32 (T, K), weights or none; out (T, D).
template <class L>
void launch(L& l, const Tensor& y, const Tensor& inverse, const Tensor& weights, const Tensor& out) {
  const auto g = globals_of<typename L::machine>(y, inverse, weights, out);
  with_input(y.dtype, [&]<Input kInput>() {
    with_input(out.dtype, [&]<Input kOutput>() {
      using C = config<kInput, kOutput>;
      l.template run<launchable<C>>(
          ceil_div(g.tokens, C::kWarps), g,
          {{"y", y}, {"inverse", inverse}, {"weights", weights}, {"out", out, Use::kWritten}});
    });
  });
}

}  // namespace mxmoe::cuda::unpermute
