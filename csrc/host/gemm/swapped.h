// Products with their operands swapped: up to 64 lines of A are the lanes of vectors, and lines of B are read word by
// word, decoded into L1 a tile at a time. Lines of B need not be turned then, which is most of what decoding them
// costs, and are not written to L2; instead the sums, which are a line of B each, are turned.
#pragma once
#include "host/gemm/tile.h"

namespace mxmoe::host::MXMOE_ISA {

constexpr int kLineTiles = 11;               // that 64 lines of B are cut into, of kMostLines or one less
constexpr int kLineWords = kLineSteps + 16;  // from line to line: they do not share cache sets
constexpr int64_t kLineBuffer = kMostLines * kLineWords;

#if defined(MXMOE_ISA_AVX512)

// R lines of B times V vectors of A, on top of acc (R, 64) where they `resume`. After every `pace` steps some of the
// next lines are decoded, by parts of the core that products leave idle.
template <int R, int V, Element E>
static void multiply_lines(const uint32_t* lines, const uint32_t* panel, int64_t steps, float* acc, bool resume,
                           Ahead& ahead, LineDecoder<E>& next, int64_t pace) {
  const bool fetch = ahead.next < ahead.end;
  const uint8_t* line = fetch ? ahead.next : reinterpret_cast<const uint8_t*>(lines);
  const int64_t line_bytes = fetch ? ahead.pace : 0;
  f32 sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = resume ? load<f32>(acc + r * kPanel + v * kLanes) : f32{};
  for (int64_t s = 0; s < steps;) {
    for (const int64_t end = steps - s < pace ? steps : s + pace; s < end; ++s, panel += kPanel, ++lines) {
      __builtin_prefetch(line, 0, 2);
      line += line_bytes;
      u32 a[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) a[v] = load<u32>(panel + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
          sum[r][v] = PairStep::multiply_add(sum[r][v], a[v], (f32)splat_u32(lines[r * kLineWords]));
    }
    if (next.left()) next.unit();
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(acc + r * kPanel + v * kLanes, sum[r][v]);
  if (fetch) ahead.next = line;
}

template <Element E>
static void multiply_lines(int num_lines, int vectors, const uint32_t* lines, const uint32_t* panel, int64_t steps,
                           float* acc, bool resume, Ahead& ahead, LineDecoder<E>& next, int64_t pace) {
  const auto call = [&]<int V>() {
    if (num_lines == kMostLines)
      multiply_lines<kMostLines, V>(lines, panel, steps, acc, resume, ahead, next, pace);
    else
      multiply_lines<kMostLines - 1, V>(lines, panel, steps, acc, resume, ahead, next, pace);
  };
  vectors == 4   ? call.template operator()<4>()
  : vectors == 3 ? call.template operator()<3>()
                 : call.template operator()<2>();
}

// Outputs of up to 64 rows and 64 columns from their sums acc (64 columns, 64 rows): times the global scales, plus
// bias, rounded once.
template <DType D>
static void finish_turned(const GemmProblem& p, const GemmGroup& g, int64_t row0, int num_rows, int64_t column0,
                          const float* acc, bool stream) {
  constexpr int kColumns = 64 / sizeof(stored<D>);  // of a vector of outputs
  for (int r = 0; r < num_rows; r += kLanes) {
    const int present = num_rows - r < kLanes ? num_rows - r : kLanes;
    f32 row_scale{};
    if (g.a.global) {
      const int64_t stride = p.a.global_stride;
      row_scale = load_strided(g.a.global + (row0 + r) * stride, stride, present);
    }
    const auto column = [&](int c) __attribute__((always_inline)) {
      f32 x = load<f32>(acc + c * kPanel + r);
      if (g.a.global) x *= row_scale;
      if (g.b.global) x *= splat(g.b.global[(column0 + c) * p.b.global_stride]);
      if (g.bias) x += splat(g.bias[column0 + c]);
      return x;
    };
    for (int c = 0; c < kPanel; c += kColumns) {
      __m512i words[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        alignas(64) stored<D> pairs[kColumns];
        if constexpr (D == DType::kF32)
          store(pairs, column(c + i));
        else
          store_pairs<D>(pairs, column(c + 2 * i), column(c + 2 * i + 1));
        words[i] = _mm512_load_si512(pairs);
      }
      transpose16(words);
      auto* out = reinterpret_cast<stored<D>*>(g.out) + (row0 + r) * p.out_stride + column0 + c;
      for (int i = 0; i < 16; ++i, out += p.out_stride) {
        if (i >= present) break;
        if (stream)
          _mm512_stream_si512(reinterpret_cast<__m512i*>(out), words[i]);
        else
          _mm512_storeu_si512(out, words[i]);
      }
    }
  }
}

#endif

}  // namespace mxmoe::host::MXMOE_ISA
