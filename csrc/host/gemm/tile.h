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

// Where R rows of A are: word s of row r at row[r] + s * step_stride.
struct TileRows {
  const uint8_t* row[kTileRows];
  int64_t step_stride;
};

// acc (R, 64) (+)= R rows of A times the panel, one step after the other.
template <class Step, int R>
static void multiply_tile(const TileRows& a, const uint32_t* panel, int64_t steps, float* acc, bool resume) {
  constexpr int kWidth = kTileVectors * kLanes;
  for (int column = 0; column < kPanel; column += kWidth) {
    f32 sum[R][kTileVectors];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kTileVectors; ++v)
        sum[r][v] = resume ? load<f32>(acc + r * kPanel + column + v * kLanes) : f32{};
    const uint32_t* b_words = panel + column;
    const uint8_t* row[R];
    for (int r = 0; r < R; ++r) row[r] = a.row[r];
    int64_t offset = 0;
    for (int64_t s = 0; s < steps; ++s, b_words += kPanel, offset += a.step_stride) {
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
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kTileVectors; ++v) store(acc + r * kPanel + column + v * kLanes, sum[r][v]);
  }
}

template <class Step>
static void multiply_tile(int num_rows, const TileRows& a, const uint32_t* panel, int64_t steps, float* acc,
                          bool resume) {
  switch (num_rows) {
    case 1:
      return multiply_tile<Step, 1>(a, panel, steps, acc, resume);
    case 2:
      return multiply_tile<Step, 2>(a, panel, steps, acc, resume);
    case 3:
      return multiply_tile<Step, 3>(a, panel, steps, acc, resume);
    case 4:
      return multiply_tile<Step, 4>(a, panel, steps, acc, resume);
    case 5:
      return multiply_tile<Step, 5>(a, panel, steps, acc, resume);
    default:
      return multiply_tile<Step, 6>(a, panel, steps, acc, resume);
  }
}

// One row of a panel's outputs: times the global scales, plus bias, plus what was there, rounded once.
template <DType D>
static void finish_row(const GemmProblem& p, const GemmGroup& g, int64_t row, int64_t column0, int columns,
                       const float* acc) {
  auto* out = reinterpret_cast<stored<D>*>(g.out) + row * p.out_stride + column0;
  const float row_scale = g.a.global ? g.a.global[row * p.a.global_stride] : 1.0f;
  for (int j = 0; j < columns; j += kLanes) {
    const int n = columns - j < kLanes ? columns - j : kLanes;
    f32 x = load<f32>(acc + j);
    if (g.a.global) x *= splat(row_scale);
    if (g.b.global) {
      float column_scale[kLanes] = {};
      for (int i = 0; i < n; ++i) column_scale[i] = g.b.global[(column0 + j + i) * p.b.global_stride];
      x *= load<f32>(column_scale);
    }
    if (g.bias) x += load_elements<DType::kF32>(g.bias + column0 + j, n);
    if (p.accumulate) x += n == kLanes ? load_elements<D>(out + j) : load_elements<D>(out + j, n);
    n == kLanes ? store_elements<D>(out + j, x) : store_elements<D>(out + j, x, n);
  }
}

}  // namespace mxmoe::host::MXMOE_ISA
