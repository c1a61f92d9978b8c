// Means over tokens of the columns of a matrix, in the contract's order: chunks of 256 tokens added in order (a first
// launch), then the chunks' sums in order (a second one).
//
// A warp takes 32 columns of a chunk.
#pragma once
#include "cuda/launch.h"
#include "cuda/tile/types.h"
#include "layout.h"

namespace mxmoe::cuda::mean_tokens {

constexpr int kChunk = 256;

template <bool kIsMean>
struct config {
  static constexpr int kWarps = 1;
  static constexpr bool kMean = kIsMean;  // else sums of chunks
};

struct shared {};

template <class M>
struct globals {
  const float* x;  // (rows, columns)
  int rows, columns;
  float tokens;
  float *out, *last;  // sums: (chunks, columns), null; means: (columns - 1,), (1,)
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using F = typename M::template lane<float>;
  m.role("mean_tokens");
  const int tiles = static_cast<int>(ceil_div(g.columns, 32));
  const int chunk = m.cta_idx() / tiles, first = C::kMean ? 0 : chunk * kChunk;
  const int end = C::kMean || g.rows - first < kChunk ? g.rows : first + kChunk;
  const auto column = m.lane_idx() + m.cta_idx() % tiles * 32;
  const auto inside = column < g.columns;
  F total{};
  for (int row = first; row < end; ++row)
    total = total + m.template ld_global<float>(g.x + int64_t{row} * g.columns, column * 4, inside);
  if constexpr (C::kMean) {
    total = m.divide(total, m.splat(g.tokens));
    m.template st_global<float>(g.out, column * 4, total, column < g.columns - 1);
    m.template st_global<float>(g.last - (g.columns - 1), column * 4, total, column == g.columns - 1);
  } else {
    m.template st_global<float>(g.out + int64_t{chunk} * g.columns, column * 4, total, inside);
  }
}

MXMOE_LAUNCHABLE("mean_tokens", shared)

// x FP32 (tokens, columns); chunks FP32 (ceil(tokens / 256), columns), a workspace; out FP32 (columns - 1,), last (1,).
template <class L>
void launch(L& l, const Tensor& x, const Tensor& chunks, const Tensor& out, const Tensor& last) {
  globals<typename L::machine> g{};
  g.x = x.ptr<float>(), g.out = chunks.ptr<float>();
  g.rows = static_cast<int>(x.sizes[0]), g.columns = static_cast<int>(x.sizes[1]);
  const int64_t tiles = ceil_div(g.columns, 32);
  l.template run<launchable<config<false>>>(ceil_div(g.rows, kChunk) * tiles, g,
                                            {{"x", x}, {"chunks", chunks, Use::kWritten}});
  g.tokens = static_cast<float>(g.rows > 0 ? g.rows : 1);
  g.x = g.out, g.rows = static_cast<int>(chunks.sizes[0]);
  g.out = out.ptr<float>(), g.last = last.ptr<float>();
  l.template run<launchable<config<true>>>(
      tiles, g, {{"chunks", chunks}, {"out", out, Use::kWritten}, {"last", last, Use::kWritten}});
}

}  // namespace mxmoe::cuda::mean_tokens
