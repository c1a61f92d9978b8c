// swiglu_backward: the gradient of (gate, up) from that of the product, rounded once; or its copies in 8-bit MX formats
// in its place.
//
// A CTA takes 128 rows of one group x 128 products: two tiles of the gradient, gates and ups or, where these take
// turns, the pairs' left and right half. A warp computes a row at a time, four pairs a lane.
#pragma once
#include "cuda/kernels/swiglu.h"

namespace mxmoe::cuda::swiglu_backward {

using swiglu::Activation;
using swiglu::Pairs;
using swiglu::Terms;

template <typename E, Input kInput>
struct config : tile_config<E, kInput> {};

template <class C>
struct two_tiles {
  tile_shared<C> half[2];
};
template <class C>
using shared = std::conditional_t<C::kCopies, two_tiles<C>, tile_or_nothing<C>>;

template <class M>
struct globals {
  const uint8_t* da;
  int64_t da_row_bytes;
  bool da_aligned;
  Pairs h, dh;  // dh without data: copies
  Activation activation;
  Copies copies;
};

// dg and du in the place of g and u; 0 where a clamp cut.
template <class M, class F>
MXMOE_KERNEL void gradients(M& m, const Activation& a, F da, F& g, F& u) {
  const Terms<F> t = swiglu::terms(m, a, g, u);
  const F scaled = a.alpha == 1.0f ? t.g : t.g * a.alpha, one = m.splat(1.0f);
  F dg = (da * t.up) * (t.s * (one + scaled * (one - t.s))), du = da * t.gate;
  if (a.has_limit) {
    dg = g > m.splat(a.limit) ? F{} : dg;
    du = (u > m.splat(a.limit)) | (u < m.splat(-a.limit)) ? F{} : du;
  }
  g = dg, u = du;
}

// (gate, up) as the two pieces of four that a lane stores: gates and ups, or pairs.
template <class F>
MXMOE_KERNEL void pieces(bool interleaved, const F (&g)[4], const F (&u)[4], F (&low)[4], F (&high)[4]) {
  for (int j = 0; j < 4; ++j) {
    low[j] = !interleaved ? g[j] : j % 2 ? u[j / 2] : g[j / 2];
    high[j] = !interleaved ? u[j] : j % 2 ? u[2 + j / 2] : g[2 + j / 2];
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  constexpr int kBytes = C::kElementBytes;
  m.role("swiglu_backward");
  const int width = g.h.width, column_tiles = static_cast<int>(ceil_div(width, C::kColumns));
  const int64_t row_tile = m.cta_idx() / column_tiles;
  const int column = m.cta_idx() % column_tiles * C::kColumns;
  const RowTile tile = find_row_tile(m, g.copies.groups, row_tile);
  const bool interleaved = g.h.interleaved;
  const auto lane = m.lane_idx(), first = lane * 4 + column;
  for (int i = 0; i < C::kRows / C::kWarps; ++i) {
    const int inside = m.warp_idx() * (C::kRows / C::kWarps) + i;
    const bool exists = inside < tile.rows, data = exists && tile.group < g.copies.groups.num_groups;
    if (!C::kCopies && !exists) break;
    const int64_t row = tile.row + inside;
    F gate[4], up[4], da[4], low[4], high[4];
    U words[kBytes];
    swiglu::load_pairs<C::kInput>(m, g.h, row, first, data, gate, up);
    load_words<kBytes>(m, g.da + row * g.da_row_bytes, first, width, g.da_aligned, data, words);
    to_floats<C::kInput>(m, words, da);
    for (int j = 0; j < 4; ++j) {
      gradients(m, g.activation, da[j], gate[j], up[j]);
      if (!data) gate[j] = F{}, up[j] = F{};
    }
    pieces(interleaved, gate, up, low, high);
    if constexpr (C::kCopies) {
      auto& s = m.template shared<shared<C>>();
      const auto at = interleaved ? lane % 16 * 8 : lane * 4;
      from_floats<C::kInput>(m, low, words);
      const auto left = lane < 16;
      if (interleaved) {
        put_in_tile<C>(m, s.half[0], inside, at, words, left),
            put_in_tile<C>(m, s.half[1], inside, at, words, lane >= 16);
        from_floats<C::kInput>(m, high, words);
        put_in_tile<C>(m, s.half[0], inside, at + 4, words, left);
        put_in_tile<C>(m, s.half[1], inside, at + 4, words, lane >= 16);
      } else {
        put_in_tile<C>(m, s.half[0], inside, at, words);
        from_floats<C::kInput>(m, high, words);
        put_in_tile<C>(m, s.half[1], inside, at, words);
      }
    } else {
      uint8_t* out = g.dh.data + row * g.dh.row_bytes;
      const int length = interleaved ? 2 * width : width;
      from_floats<C::kInput>(m, low, words);
      store_words<kBytes>(m, out, interleaved ? first * 2 : first, length, g.dh.aligned, true, words);
      from_floats<C::kInput>(m, high, words);
      store_words<kBytes>(m, interleaved ? out : out + int64_t{width} * kBytes, interleaved ? first * 2 + 4 : first,
                          length, g.dh.aligned, true, words);
    }
  }
  if constexpr (C::kCopies) {
    auto& s = m.template shared<shared<C>>();
    m.syncwarp();  // a warp takes from the tile what it put there
    for (int half = 0; half < 2; ++half) {
      const int start = interleaved ? 2 * column + half * C::kColumns : half * width + column;
      const int columns = (interleaved ? 2 * width : (half + 1) * width) - start;
      if (columns > 0)
        quantize_tile<C>(m, g.copies, s.half[half], tile, row_tile, start, smaller(columns, C::kColumns));
    }
  }
}

MXMOE_LAUNCHABLE("swiglu_backward", shared<C>)

// da (N, F), h (N, 2F); offs (E,) or none; dh (N, 2F) of h's dtype, or none and copies of E: F a multiple of 32, or
// interleaved.
template <typename E, class L>
void launch(L& l, const Tensor& da, const Tensor& h, const Tensor& offs, const Activation& activation, bool interleaved,
            bool floor, const Tensor& dh, const CopyTensors& row, const CopyTensors& column) {
  globals<typename L::machine> g{};
  g.da = da.ptr<uint8_t>(), g.da_row_bytes = da.strides[0] * bytes_of(da.dtype), g.da_aligned = in_fours(da);
  g.h = swiglu::pairs_of(h, interleaved), g.activation = activation;
  if (dh) g.dh = swiglu::pairs_of(dh, interleaved);
  g.copies = copies_of(groups_of(offs, 1, h.sizes[0]), h.sizes[1], false, floor, row, column);
  with_input(h.dtype, [&]<Input kInput>() {
    using C = config<E, kInput>;
    l.template run<launchable<C>>(row_tiles(g.copies.groups) * ceil_div(g.h.width, C::kColumns), g,
                                  written({{"da", da}, {"h", h}, {"offs", offs}}, dh, row, column));
  });
}

}  // namespace mxmoe::cuda::swiglu_backward
