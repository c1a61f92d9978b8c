// The register micro-kernel and its epilogue.
#pragma once
#include "host/elements.h"
#include "host/gemm/pack.h"

namespace mxmoe::host::MXMOE_ISA {

constexpr int kTileRows = 6;
#if defined(MXMOE_ISA_AVX512)
constexpr int kTileVectors = 4;  // 24 of 32 registers accumulate
#else
constexpr int kTileVectors = 2;  // 12 of 16
#endif

constexpr int kPanelVectors = kPanel / kLanes;

// Where R rows of A are: word s of row r at row[r] + s * step_stride.
struct TileRows {
  const uint8_t* row[kTileRows];
  int64_t step_stride;
};

// What becomes of a tile's sums in their registers: kept in `acc` (rows, 64), or, where they are the outputs, rounded
// and written or added to what was there.
enum class Sink { kSums, kBF16, kF32, kAddF32 };

struct TileOut {
  uint8_t* row[kTileRows];  // at the panel's first column
  bool stream;              // aligned to 64 bytes
};

template <class Step, Sink kSink>
MXMOE_INLINE void put_sums(uint8_t* to, f32* x, bool stream) {
  if constexpr (kSink == Sink::kBF16) {
    auto* out = reinterpret_cast<uint16_t*>(to);
    for (int v = 0; v < kTileVectors; v += 2) {
#if defined(MXMOE_ISA_AVX512)
      if constexpr (Step::kNormalSums) {
        const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh((__m512)x[v + 1], (__m512)x[v]);
        if (stream)
          _mm512_stream_si512(reinterpret_cast<__m512i*>(out + v * kLanes), pair);
        else
          _mm512_storeu_si512(out + v * kLanes, pair);
        continue;
      }
#endif
      if (stream) {
        stream_elements<DType::kBF16>(out + v * kLanes, x[v], x[v + 1]);
      } else {
        for (int i = v; i < v + 2; ++i) store_elements<DType::kBF16>(out + i * kLanes, x[i]);
      }
    }
  } else {
    auto* out = reinterpret_cast<float*>(to);
    for (int v = 0; v < kTileVectors; ++v) {
      if (kSink == Sink::kAddF32) x[v] += load<f32>(out + v * kLanes);
    }
    for (int v = 0; v < kTileVectors; v += 2) {
      if (kSink == Sink::kF32 && stream) {
        stream_elements<DType::kF32>(out + v * kLanes, x[v], x[v + 1]);
      } else {
        for (int i = v; i < v + 2; ++i) store(out + i * kLanes, x[i]);
      }
    }
  }
}

// R rows of A times the panel, one step after the other, on top of acc (R, 64) where they `resume`.
template <class Step, Sink kSink, int R>
static void multiply_tile(const TileRows& a, const uint32_t* panel, int64_t steps, float* acc, bool resume,
                          Ahead& ahead, const TileOut& out) {
  constexpr int kWidth = kTileVectors * kLanes;
  for (int column = 0; column < kPanel; column += kWidth) {
    const bool fetch = ahead.next < ahead.end;
    const uint8_t* line = fetch ? ahead.next : a.row[0];
    const int64_t line_bytes = fetch ? ahead.pace : 0;
    f32 sum[R][kTileVectors];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kTileVectors; ++v)
        sum[r][v] = resume ? load<f32>(acc + r * kPanel + column + v * kLanes) : f32{};
    const uint32_t* b_words = panel + column;
    const uint8_t* row[R];
    for (int r = 0; r < R; ++r) row[r] = a.row[r];
    int64_t offset = 0;
    for (int64_t s = 0; s < steps; ++s, b_words += kPanel, offset += a.step_stride) {
      __builtin_prefetch(line, 0, 2);
      line += line_bytes;
      f32 b[kTileVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) b[v] = (f32)load<u32>(b_words + v * kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        uint32_t word;
        memcpy(&word, row[r] + offset, 4);
#pragma GCC unroll 4
        for (int v = 0; v < kTileVectors; ++v) sum[r][v] = Step::multiply_add(sum[r][v], splat_u32(word), b[v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      constexpr int kBytes = kSink == Sink::kBF16 ? 2 : 4;
      uint8_t* to = kSink == Sink::kSums ? reinterpret_cast<uint8_t*>(acc + r * kPanel) : out.row[r];
      put_sums<Step, kSink>(to + column * kBytes, sum[r], out.stream);
    }
    if (fetch) ahead.next = line;
  }
}

template <class Step, Sink kSink>
static void multiply_tile(int num_rows, const TileRows& a, const uint32_t* panel, int64_t steps, float* acc,
                          bool resume, Ahead& ahead, const TileOut& out) {
  switch (num_rows) {
    case 1:
      return multiply_tile<Step, kSink, 1>(a, panel, steps, acc, resume, ahead, out);
    case 2:
      return multiply_tile<Step, kSink, 2>(a, panel, steps, acc, resume, ahead, out);
    case 3:
      return multiply_tile<Step, kSink, 3>(a, panel, steps, acc, resume, ahead, out);
    case 4:
      return multiply_tile<Step, kSink, 4>(a, panel, steps, acc, resume, ahead, out);
    case 5:
      return multiply_tile<Step, kSink, 5>(a, panel, steps, acc, resume, ahead, out);
    default:
      return multiply_tile<Step, kSink, 6>(a, panel, steps, acc, resume, ahead, out);
  }
}

template <class Step>
static void multiply_tile(Sink sink, int num_rows, const TileRows& a, const uint32_t* panel, int64_t steps, float* acc,
                          bool resume, Ahead& ahead, const TileOut& out) {
  switch (sink) {
    case Sink::kSums:
      return multiply_tile<Step, Sink::kSums>(num_rows, a, panel, steps, acc, resume, ahead, out);
    case Sink::kBF16:
      return multiply_tile<Step, Sink::kBF16>(num_rows, a, panel, steps, acc, resume, ahead, out);
    case Sink::kF32:
      return multiply_tile<Step, Sink::kF32>(num_rows, a, panel, steps, acc, resume, ahead, out);
    case Sink::kAddF32:
      return multiply_tile<Step, Sink::kAddF32>(num_rows, a, panel, steps, acc, resume, ahead, out);
  }
}

// n <= kLanes values p[0], p[stride], ...
MXMOE_INLINE f32 load_strided(const float* p, int64_t stride, int n) {
  if (stride == 0) return splat(*p);
  if (stride == 1) return n == kLanes ? load<f32>(p) : load_elements<DType::kF32>(p, n);
  float part[kLanes] = {};
  for (int i = 0; i < n; ++i) part[i] = p[i * stride];
  return load<f32>(part);
}

// 64 outputs, the first n of them written.
template <DType D>
MXMOE_INLINE void store_outputs(stored<D>* out, const f32* x, int n, bool stream) {
  if (stream) {
    for (int v = 0; v < kPanelVectors; v += 2) stream_elements<D>(out + v * kLanes, x[v], x[v + 1]);
  } else if (n == kPanel) {
    for (int v = 0; v < kPanelVectors; ++v) store_elements<D>(out + v * kLanes, x[v]);
  } else {
    stored<D> part[kPanel];
    for (int v = 0; v < kPanelVectors; ++v) store_elements<D>(part + v * kLanes, x[v]);
    memcpy(out, part, n * sizeof(*out));
  }
}

// Whether the sums of a panel of so many columns are its outputs, but for a rounding or an addition.
static inline Sink sink_of(const GemmProblem& p, const GemmGroup& g, int columns) {
  if (columns < kPanel || g.a.global || g.b.global || g.bias) return Sink::kSums;
  if (p.out_dtype == DType::kF32) return p.accumulate ? Sink::kAddF32 : Sink::kF32;
  return p.out_dtype == DType::kBF16 && !p.accumulate ? Sink::kBF16 : Sink::kSums;
}

// A tile's rows of one panel: times the global scales, plus bias, plus what was there, rounded once.
template <DType D>
static void finish_tile(const GemmProblem& p, const GemmGroup& g, const int32_t* rows, int num_rows, int64_t column0,
                        int columns, const float* acc, bool stream) {
  const auto each = [&](const auto& body) {
    for (int v = 0; v < kPanelVectors; ++v)
      if (const int n = columns - v * kLanes; n > 0) body(v, n < kLanes ? n : kLanes);
  };
  f32 scale[kPanelVectors], bias[kPanelVectors];
  if (g.b.global) {
    const int64_t stride = p.b.global_stride;
    each([&](int v, int n) { scale[v] = load_strided(g.b.global + (column0 + v * kLanes) * stride, stride, n); });
  }
  if (g.bias) each([&](int v, int n) { bias[v] = load_strided(g.bias + column0 + v * kLanes, 1, n); });

  for (int i = 0; i < num_rows; ++i, acc += kPanel) {
    auto* out = reinterpret_cast<stored<D>*>(g.out) + rows[i] * p.out_stride + column0;
    f32 x[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v) x[v] = load<f32>(acc + v * kLanes);
    if (g.a.global) {
      const f32 row_scale = splat(g.a.global[rows[i] * p.a.global_stride]);
      for (int v = 0; v < kPanelVectors; ++v) x[v] *= row_scale;
    }
    if (g.b.global)
      for (int v = 0; v < kPanelVectors; ++v) x[v] *= scale[v];
    if (g.bias)
      for (int v = 0; v < kPanelVectors; ++v) x[v] += bias[v];
    if (p.accumulate && columns == kPanel)
      for (int v = 0; v < kPanelVectors; ++v) x[v] += load_elements<D>(out + v * kLanes);
    else if (p.accumulate)
      each([&](int v, int n) { x[v] += load_elements<D>(out + v * kLanes, n); });
    store_outputs<D>(out, x, columns, stream && columns == kPanel);
  }
}

static void finish_tile(const GemmProblem& p, const GemmGroup& g, const int32_t* rows, int num_rows, int64_t column0,
                        int columns, const float* acc, bool stream) {
  with_dtype(p.out_dtype, [&]<DType D>() { finish_tile<D>(p, g, rows, num_rows, column0, columns, acc, stream); });
}

}  // namespace mxmoe::host::MXMOE_ISA
