// permute: out[n] = x[permutation[n] / top_k], zero where that is -1; or, of floats, its copies in 8-bit MX formats in
// its place.
//
// A CTA takes 128 rows of out (of one group, for copies) x 128 columns; a warp moves a row at a time, four elements a
// lane.
#pragma once
#include "cuda/kernels/quantize_tile.h"

namespace mxmoe::cuda::permute {

// kBytes: of an element. kInput says what they are where there are copies.
template <typename E, Input kInput, int kBytes = bytes_of(kInput)>
struct config : tile_config<E, kInput> {
  static constexpr int kElementBytes = kBytes;
};

template <class C>
using shared = tile_or_nothing<C>;

template <class M>
struct globals {
  const uint8_t* x;
  int64_t x_row_bytes;
  const int32_t* permutation;
  int top_k;
  Copies copies;  // of out
  uint8_t* out;   // null: copies
  int64_t out_row_bytes;
  bool x_aligned, out_aligned;
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using U = typename M::template lane<uint32_t>;
  m.role("permute");
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
    U words[C::kElementBytes];
    load_words<C::kElementBytes>(m, g.x + int64_t{slot < 0 ? 0 : slot / g.top_k} * g.x_row_bytes, first, length,
                                 g.x_aligned, slot >= 0, words);
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

MXMOE_LAUNCHABLE("permute", shared<C>)

// x (T, D); permutation (N,); out (N, D) of x's dtype, or none and copies of E with offs (E,).
template <typename E, class L>
void launch(L& l, const Tensor& x, const Tensor& permutation, int64_t top_k, const Tensor& offs, bool floor,
            const Tensor& out, const CopyTensors& row, const CopyTensors& column) {
  globals<typename L::machine> g{};
  g.x = x.ptr<uint8_t>(), g.x_row_bytes = x.strides[0] * bytes_of(x.dtype), g.x_aligned = in_fours(x);
  g.permutation = permutation.ptr<int32_t>(), g.top_k = static_cast<int>(top_k);
  g.copies =
      copies_of(groups_of(out ? Tensor{} : offs, 1, permutation.sizes[0]), x.sizes[1], false, floor, row, column);
  g.out = out.ptr<uint8_t>(), g.out_row_bytes = out.strides[0] * bytes_of(x.dtype), g.out_aligned = in_fours(out);
  const auto run = [&]<class C>() {
    l.template run<launchable<C>>(row_tiles(g.copies.groups) * ceil_div(g.copies.length, C::kColumns), g,
                                  written({{"x", x}, {"permutation", permutation}, {"offs", offs}}, out, row, column));
  };
  if constexpr (std::is_same_v<E, NoCopies>) {
    if (bytes_of(x.dtype) == 1) run.template operator()<config<E, Input::kF32, 1>>();
    if (bytes_of(x.dtype) == 2) run.template operator()<config<E, Input::kBF16>>();
    if (bytes_of(x.dtype) == 4) run.template operator()<config<E, Input::kF32>>();
  } else {
    with_input(x.dtype, [&]<Input kInput>() { run.template operator()<config<E, kInput>>(); });
  }
}

}  // namespace mxmoe::cuda::permute
