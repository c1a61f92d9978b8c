// dequantize: values * scales (* global scale) of a copy of any format and axis, rounded once; a warp takes 32 rows of
// 128 columns, a lane every 32nd column. Rows past the last group are written as zero.
#pragma once
#include "cuda/kernels/elements.h"
#include "cuda/kernels/scaled_copy.h"

namespace mxmoe::cuda::dequantize {

template <Format kTheFormat, Input kOutputType>
struct config {
  using Facts = FormatFacts<kTheFormat>;
  using Element = typename Facts::Element;
  static constexpr Input kOutput = kOutputType;
  static constexpr int kWarps = 4, kColumns = 128, kBlock = Facts::kBlock;
  static constexpr bool kGlobal = Facts::kGlobalScale, kFp4 = Element::kBits == 4;
};

struct shared {};

template <class M>
struct globals {
  Groups groups;
  ScaledCopy copy;
  uint8_t* out;  // rows of all matrices, out_stride elements apart
  int64_t out_stride;
};

// Of one row of the tile, the elements of 32 columns.
template <class C, class M, class I, class P>
MXMOE_KERNEL auto decode(M& m, const globals<M>& g, const RowTile& tile, int64_t row_tile, int row, I column,
                         P exists) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  using E = typename C::Element;
  const ScaledCopy& c = g.copy;
  const int64_t blocks = ceil_div(c.contraction, C::kBlock), position = c.start(tile, row_tile) + row;
  const int64_t first_line = c.matrix(tile) * c.length;  // of a column copy
  const auto line = [&](int64_t bytes) { return m.template cast<int>(column * static_cast<int>(bytes)); };
  U code, scale, nibble = {};
  const auto load = [&](const uint8_t* base, I offset) {
    return m.template cast<uint32_t>(m.template ld_global<uint8_t>(base, offset, exists));
  };
  if (!c.column) {
    const int64_t row_bytes = C::kFp4 ? ceil_div(c.length, 2) : c.length;
    code = load(c.values + (tile.row + row) * row_bytes, C::kFp4 ? column / 2 : column);
    nibble = m.template cast<uint32_t>(column % 2);
    scale = load(c.scales + (tile.row + row) * blocks, column / C::kBlock);
  } else {
    const int64_t line_bytes = ceil_div(c.contraction, 2);
    code = C::kFp4 ? load(c.values + first_line * line_bytes + position / 2, line(line_bytes))
                   : load(c.values + (c.row(tile, row_tile) + row) * c.length, column);
    nibble = nibble + static_cast<uint32_t>(position % 2);
    scale = load(c.scales + first_line * blocks + position / C::kBlock, line(blocks));
  }
  if constexpr (C::kFp4) code = code >> (4u * nibble) & 15u;
  constexpr uint32_t kSign = 1u << (E::kBits - 1);
  const U magnitude = decode_magnitude<E, F, U>(code & (kSign - 1u));
  const F x = __builtin_bit_cast(F, magnitude | (code & kSign) << (32 - E::kBits));
  U factor;
  if constexpr (C::kGlobal)
    factor = decode_magnitude<E4M3, F, U>(scale & 0x7fu);
  else
    factor = e8m0_bits<U>(scale);
  return x * __builtin_bit_cast(F, factor);
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  m.role("dequantize");
  const int column_tiles = static_cast<int>(ceil_div(g.copy.length, C::kColumns));
  const int64_t row_tile = m.cta_idx() / column_tiles;
  const int first_column = m.cta_idx() % column_tiles * C::kColumns;
  const RowTile tile = find_row_tile(m, g.groups, row_tile);
  const bool data = tile.group < g.groups.num_groups;
  for (int row = m.warp_idx() * 32; row < tile.rows && row < m.warp_idx() * 32 + 32; ++row) {
    float global = 1.0f;
    if (C::kGlobal && data)
      global = m.ld_global_uniform(g.copy.global + g.copy.global_index(tile) + (g.copy.scope == Scope::kRow ? row : 0));
    for (int i = 0; i < C::kColumns; i += 32) {
      const auto column = m.lane_idx() + (first_column + i);
      const auto exists = column < static_cast<int>(g.copy.length);
      F x = {};
      if (data) {
        x = decode<C>(m, g, tile, row_tile, row, column, exists);
        if constexpr (C::kGlobal) x = x * global;
      }
      constexpr int kBytes = bytes_of(C::kOutput);
      uint8_t* out = g.out + (tile.row + row) * g.out_stride * kBytes;
      if constexpr (C::kOutput == Input::kF32)
        m.template st_global<uint32_t>(out, column * kBytes, __builtin_bit_cast(U, x), exists);
      else
        m.template st_global<uint16_t>(
            out, column * kBytes,
            m.template cast<uint16_t>((C::kOutput == Input::kBF16 ? m.cvt_bf16x2(x, x) : m.cvt_f16x2(x, x)) & 0xffffu),
            exists);
    }
  }
}

MXMOE_LAUNCHABLE("dequantize", shared)

// One copy, scales plain; out (B, R, L), rows of unit stride, matrices R rows apart.
template <Format kFormat, class L>
void launch(L& l, const Tensor& values, const Tensor& scales, const Tensor& global, const Tensor& offs, bool column,
            Scope scope, const Tensor& out) {
  globals<typename L::machine> g{};
  const int64_t batch = out.sizes[0], rows = out.sizes[1], groups = offs ? offs.sizes[0] : batch;
  g.groups = {offs.ptr<int32_t>(), static_cast<int>(groups), static_cast<int>(rows), batch * rows};
  g.copy = scaled_copy_of(offs, rows, out.sizes[2], column, scope, values, scales, global);
  g.out = out.ptr<uint8_t>(), g.out_stride = out.strides[1];
  const int64_t tiles = offs ? padded_rows(rows, groups + 1) / kTileRows : batch * ceil_div(rows, kTileRows);
  with_input(out.dtype, [&]<Input kOutput>() {
    l.template run<launchable<config<kFormat, kOutput>>>(tiles * ceil_div(out.sizes[2], 128), g,
                                                         {{"values", values},
                                                          {"scales", scales},
                                                          {"global scale", global},
                                                          {"offs", offs},
                                                          {"out", out, Use::kWritten}});
  });
}

}  // namespace mxmoe::cuda::dequantize
