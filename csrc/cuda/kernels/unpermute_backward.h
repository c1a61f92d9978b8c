// unpermute_backward: rows_grad[n] = weights[slot] * dy[slot / top_k] rounded once, slot = permutation[n], zero where
// that is -1; or its copies in 8-bit MX formats in its place.
//
// A CTA takes 128 rows (of one group, for copies) x 128 columns; a warp computes a row at a time, four elements a lane.
// The weights' gradient is a kernel of its own, weights_grad.h: its sums run over whole rows.
#pragma once
#include "cuda/kernels/quantize_tile.h"

namespace mxmoe::cuda::unpermute_backward {

// kInput: rows' type. kGradient: dy's.
template <typename E, Input kInput, Input kGradientType>
struct config : tile_config<E, kInput> {
  static constexpr Input kGradient = kGradientType;
};

template <class C>
using shared = tile_or_nothing<C>;

template <class M>
struct globals {
  const uint8_t* dy;
  int64_t dy_row_bytes;
  const int32_t* permutation;
  const float* weights;  // (tokens * top_k,), or null: 1
  int top_k;
  Copies copies;  // of rows_grad
  uint8_t* out;   // null: copies
  int64_t out_row_bytes;
  bool dy_aligned, out_aligned;
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  m.role("unpermute_backward");
  const int length = static_cast<int>(g.copies.length), column_tiles = static_cast<int>(ceil_div(length, C::kColumns));
  const int64_t row_tile = m.cta_idx() / column_tiles;
  const int column = m.cta_idx() % column_tiles * C::kColumns;
  const RowTile tile = find_row_tile(m, g.copies.groups, row_tile);
  const auto first = m.lane_idx() * 4 + column;
  for (int i = 0; i < C::kRows / C::kWarps; ++i) {
    const int inside = m.warp_idx() * (C::kRows / C::kWarps) + i;
    const bool exists = inside < tile.rows;
    if (!C::kCopies && !exists) break;
    const int slot = exists ? m.ld_global_uniform(g.permutation + tile.row + inside) : -1;
    U from[bytes_of(C::kGradient)], words[C::kElementBytes];
    F x[4];
    load_words<bytes_of(C::kGradient)>(m, g.dy + int64_t{slot < 0 ? 0 : slot / g.top_k} * g.dy_row_bytes, first, length,
                                       g.dy_aligned, slot >= 0, from);
    to_floats<C::kGradient>(m, from, x);
    if (g.weights && slot >= 0) {
      const float weight = m.ld_global_uniform(g.weights + slot);
      for (int j = 0; j < 4; ++j) x[j] = x[j] * weight;
    }
    from_floats<C::kInput>(m, x, words);
    if constexpr (C::kCopies)
      put_in_tile<C>(m, m.template shared<shared<C>>(), inside, m.lane_idx() * 4, words);
    else
      store_words<C::kElementBytes>(m, g.out + (tile.row + inside) * g.out_row_bytes, first, length, g.out_aligned,
                                    true, words);
  }
  if constexpr (C::kCopies) {
    m.syncwarp();  // a warp takes from the tile what it put there
    quantize_tile<C>(m, g.copies, m.template shared<shared<C>>(), tile, row_tile, column,
                     smaller(length - column, C::kColumns));
  }
}

MXMOE_LAUNCHABLE("unpermute_backward", shared<C>)

// dy (T, D); permutation (N,); weights FP32 (T, K) or none; rows (N, D), or none and copies of E of BF16 rows, with
// offs.
template <typename E, class L>
void launch(L& l, const Tensor& dy, const Tensor& permutation, const Tensor& weights, int64_t top_k, const Tensor& offs,
            bool floor, const Tensor& rows, const CopyTensors& row, const CopyTensors& column) {
  globals<typename L::machine> g{};
  g.dy = dy.ptr<uint8_t>(), g.dy_row_bytes = dy.strides[0] * bytes_of(dy.dtype), g.dy_aligned = in_fours(dy);
  g.permutation = permutation.ptr<int32_t>(), g.weights = weights.ptr<float>(), g.top_k = static_cast<int>(top_k);
  g.copies =
      copies_of(groups_of(rows ? Tensor{} : offs, 1, permutation.sizes[0]), dy.sizes[1], false, floor, row, column);
  g.out = rows.ptr<uint8_t>(), g.out_row_bytes = rows.strides[0] * bytes_of(rows.dtype), g.out_aligned = in_fours(rows);
  const auto run = [&]<Input kInput>() {
    with_input(dy.dtype, [&]<Input kGradient>() {
      using C = config<E, kInput, kGradient>;
      l.template run<launchable<C>>(
          row_tiles(g.copies.groups) * ceil_div(g.copies.length, C::kColumns), g,
          written({{"dy", dy}, {"permutation", permutation}, {"weights", weights}, {"offs", offs}}, rows, row, column));
    });
  };
  if constexpr (std::is_same_v<E, NoCopies>)
    with_input(rows.dtype, run);
  else
    run.template operator()<Input::kBF16>();
}

}  // namespace mxmoe::cuda::unpermute_backward
