// grouped_mm and grouped_mm_wgrad in FP32, of operands in FP32, BF16 or FP16 with any strides: for routers and for
// comparison. A lane has an output, a warp eight rows of 32 of them; the contraction is summed in ascending order.
#pragma once
#include "cuda/kernels/elements.h"
#include "cuda/kernels/grouped_mm.h"
#include "cuda/kernels/groups.h"
#include "cuda/launch.h"

namespace mxmoe::cuda::products_fp32 {

template <bool kWeightsGrad, Output kOutputType>
struct config {
  static constexpr bool kGrad = kWeightsGrad;
  static constexpr Output kOutput = kOutputType;
  static constexpr int kWarps = 4, kRows = 8, kOutputs = 32;
};

struct shared {};

// (matrices, lines, contraction) of elements.
struct Matrix {
  const uint8_t* data;
  Input type;
  int64_t stride[3];
};

template <class M>
struct globals {
  Matrix a, b;
  Groups groups;  // of a's lines; of the contraction where the weights' gradient is made
  int lines, outputs, contraction;
  const float* bias;  // (E, O) or none
  uint8_t* out;
  int64_t out_stride[2];  // of a matrix, of a line
  bool accumulate;
};

// f.template operator()<Input>() of the element at base + index for one lane, or for all.
template <Input kInput, class M>
MXMOE_KERNEL auto uniform_element(M& m, const uint8_t* base, int64_t index) {
  using Element = std::conditional_t<kInput == Input::kF32, uint32_t, uint16_t>;
  const Element word = m.ld_global_uniform(reinterpret_cast<const Element*>(base) + index);
  return to_float<kInput, 0>(m, m.splat(static_cast<uint32_t>(word)));
}
template <class M>
MXMOE_KERNEL auto uniform_element(M& m, const Matrix& x, int64_t index) {
  if (x.type == Input::kF32) return uniform_element<Input::kF32>(m, x.data, index);
  if (x.type == Input::kBF16) return uniform_element<Input::kBF16>(m, x.data, index);
  return uniform_element<Input::kF16>(m, x.data, index);
}
template <class M, class I, class P>
MXMOE_KERNEL auto element(M& m, const Matrix& x, int64_t index, I lines, P exists) {
  const int bytes = bytes_of(x.type);
  const uint8_t* base = x.data + index * bytes;
  const I offset = lines * static_cast<int>(x.stride[1] * bytes);
  if (x.type == Input::kF32) return to_float<Input::kF32, 0>(m, m.template ld_global<uint32_t>(base, offset, exists));
  const auto word = m.template cast<uint32_t>(m.template ld_global<uint16_t>(base, offset, exists));
  return x.type == Input::kBF16 ? to_float<Input::kBF16, 0>(m, word) : to_float<Input::kF16, 0>(m, word);
}

// Lines [line, line + count) of a times outputs [output, + 32) of matrix `expert`, over [first, end) of the
// contraction.
template <class C, class M>
MXMOE_KERNEL void multiply(M& m, const globals<M>& g, int expert, int64_t line, int count, int output, int64_t first,
                           int64_t end, int64_t out_line) {
  using F = typename M::template lane<float>;
  const auto exists = m.lane_idx() + output < g.outputs;
  F y[C::kRows] = {};
  const int64_t matrix = C::kGrad ? 0 : expert * g.b.stride[0];
  for (int64_t k = first; k < end; ++k) {
    const F b = element(m, g.b, matrix + output * g.b.stride[1] + k * g.b.stride[2], m.lane_idx(), exists);
    unrolled<C::kRows>([&](int i) {
      if (i < count) y[i] = m.fma(uniform_element(m, g.a, (line + i) * g.a.stride[1] + k * g.a.stride[2]), b, y[i]);
    });
  }
  F bias = {};
  if (g.bias && expert < g.groups.num_groups)
    bias = m.template ld_global<float>(g.bias + int64_t{expert} * g.outputs + output, m.lane_idx() * 4, exists);
  constexpr int kBytes = bytes_of(C::kOutput);
  unrolled<C::kRows>([&](int i) {
    if (i >= count) return;
    uint8_t* out =
        g.out + ((C::kGrad ? expert * g.out_stride[0] : 0) + (out_line + i) * g.out_stride[1] + output) * kBytes;
    F z[2] = {g.bias ? y[i] + bias : y[i], {}};
    const auto column = m.lane_idx() * 1;
    const int columns = g.outputs - output;
    if (C::kGrad && g.accumulate) {
      F before[1] = {element(m, {out, C::kOutput, {0, 1, 0}}, 0, column, column < columns)};
      z[0] = z[0] + before[0];
    }
    if constexpr (kBytes == 4)
      m.template st_global<float>(out, column * 4, z[0], column < columns);
    else
      m.template st_global<uint16_t>(
          out, column * 2,
          m.template cast<uint16_t>((C::kOutput == Output::kBF16 ? m.cvt_bf16x2(z[0], z[1]) : m.cvt_f16x2(z[0], z[1])) &
                                    0xffffu),
          column < columns);
  });
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  m.role("products");
  const int output_tiles = static_cast<int>(ceil_div(g.outputs, C::kOutputs));
  const int tile_idx = m.cta_idx() / output_tiles, output = m.cta_idx() % output_tiles * C::kOutputs;
  const int first = m.warp_idx() * 32;  // line of the tile
  if constexpr (C::kGrad) {
    const int line_tiles = static_cast<int>(ceil_div(g.lines, kTileRows)), expert = tile_idx / line_tiles;
    const int line = tile_idx % line_tiles * kTileRows + first;
    const int64_t start = expert ? g.groups.end(m, expert - 1) : 0, end = g.groups.end(m, expert);
    for (int i = 0; i < 32 && line + i < g.lines; i += C::kRows)
      multiply<C>(m, g, expert, line + i, smaller(g.lines - line - i, C::kRows), output, start, end, line + i);
  } else {
    const RowTile tile = find_row_tile(m, g.groups, tile_idx);
    const int contraction = tile.group < g.groups.num_groups ? g.contraction : 0;
    for (int i = first; i < first + 32 && i < tile.rows; i += C::kRows)
      multiply<C>(m, g, tile.group, tile.row + i, smaller(tile.rows - i, C::kRows), output, 0, contraction,
                  tile.row + i);
  }
}

MXMOE_LAUNCHABLE("products_fp32", shared)

inline Matrix matrix_of(const Tensor& t) {
  Matrix x{
      t.ptr<uint8_t>(), Input::kF32, {t.ndim == 3 ? t.strides[0] : 0, t.strides[t.ndim - 2], t.strides[t.ndim - 1]}};
  with_input(t.dtype, [&]<Input kInput>() { x.type = kInput; });
  return x;
}

// a (M, C), b (E, O, C), bias FP32 (E, O) or none, out (M, O); grad: a (O, P), b (C, P), out (E, O, C), written or
// added. Any strides, out's rows of unit stride.
template <bool kGrad, class L>
void launch(L& l, const Tensor& a, const Tensor& b, const Tensor& offs, const Tensor& bias, bool accumulate,
            const Tensor& out) {
  globals<typename L::machine> g{};
  g.a = matrix_of(a), g.b = matrix_of(b);
  const int64_t groups = offs.sizes[0];
  g.groups = {offs.ptr<int32_t>(), static_cast<int>(groups), 0, a.sizes[kGrad ? 1 : 0]};
  g.lines = static_cast<int>(a.sizes[0]), g.contraction = static_cast<int>(a.sizes[1]);
  g.outputs = static_cast<int>(b.sizes[b.ndim - 2]), g.bias = bias.ptr<float>(), g.out = out.ptr<uint8_t>();
  g.out_stride[0] = kGrad ? out.strides[0] : 0, g.out_stride[1] = out.strides[out.ndim - 2], g.accumulate = accumulate;
  const int64_t tiles = kGrad ? groups * ceil_div(g.lines, kTileRows) : padded_rows(g.lines, groups + 1) / kTileRows;
  with_output(out.dtype, [&]<Output kOutput>() {
    l.template run<launchable<config<kGrad, kOutput>>>(
        tiles * ceil_div(g.outputs, 32), g,
        {{"a", a}, {"b", b}, {"offs", offs}, {"bias", bias}, {"out", out, accumulate ? Use::kUpdated : Use::kWritten}});
  });
}

}  // namespace mxmoe::cuda::products_fp32
