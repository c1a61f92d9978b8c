// swiglu: out = g * sigmoid(alpha * g) * (u + offset), rounded once; or its copies in 8-bit MX formats in its place.
//
// A CTA takes 128 rows of one group x 128 outputs. A warp computes a row at a time, four outputs a lane.
#pragma once
#include "cuda/kernels/arithmetic.h"
#include "cuda/kernels/quantize_tile.h"

namespace mxmoe::cuda::swiglu {

struct Activation {
  float alpha, limit, offset;
  bool has_limit;
};

template <typename E, Input kInput>
struct config : tile_config<E, kInput> {};

template <class C>
using shared = tile_or_nothing<C>;

// Rows of (gate, up): gate and up next to each other (interleaved), or all gates first.
struct Pairs {
  uint8_t* data;
  int64_t row_bytes;
  int width;  // pairs
  bool interleaved, aligned;
};

template <class M>
struct globals {
  Pairs h;
  Activation activation;
  Copies copies;  // of out
  uint8_t* out;   // null: copies
  int64_t out_row_bytes;
  bool out_aligned;
};

// Pairs first .. first + 4 of each lane, zero past the row.
template <Input kInput, class M, class I, class F>
MXMOE_KERNEL void load_pairs(M& m, const Pairs& p, int64_t row, I first, bool exists, F (&g)[4], F (&u)[4]) {
  using U = typename M::template lane<uint32_t>;
  constexpr int kBytes = bytes_of(kInput);
  const uint8_t* base = p.data + row * p.row_bytes;
  U low[kBytes], high[kBytes];
  if (p.interleaved) {
    load_words<kBytes>(m, base, first * 2, 2 * p.width, p.aligned, exists, low);
    load_words<kBytes>(m, base, first * 2 + 4, 2 * p.width, p.aligned, exists, high);
  } else {
    load_words<kBytes>(m, base, first, p.width, p.aligned, exists, low);
    load_words<kBytes>(m, base + int64_t{p.width} * kBytes, first, p.width, p.aligned, exists, high);
  }
  F x[4], y[4];
  to_floats<kInput>(m, low, x), to_floats<kInput>(m, high, y);
  for (int j = 0; j < 4; ++j) {
    g[j] = !p.interleaved ? x[j] : j < 2 ? x[2 * j] : y[2 * j - 4];
    u[j] = !p.interleaved ? y[j] : j < 2 ? x[2 * j + 1] : y[2 * j - 3];
  }
}

// Clamped g, sigmoid(alpha * g), g * sigmoid, clamped u + offset. The clamps keep NaN.
template <class F>
struct Terms {
  F g, s, gate, up;
};
template <class M, class F>
MXMOE_KERNEL Terms<F> terms(M& m, const Activation& a, F g, F u) {
  if (a.has_limit) {
    const F most = m.splat(a.limit), least = m.splat(-a.limit);
    g = g > most ? most : g;
    u = u > most ? most : u;
    u = u < least ? least : u;
  }
  if (a.offset != 0.0f) u = u + a.offset;
  const F s = sigmoid(m, a.alpha == 1.0f ? g : g * a.alpha);
  return {g, s, g * s, u};
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  m.role("swiglu");
  const int column_tiles = static_cast<int>(ceil_div(g.h.width, C::kColumns));
  const int64_t row_tile = m.cta_idx() / column_tiles;
  const int column = m.cta_idx() % column_tiles * C::kColumns;
  const RowTile tile = find_row_tile(m, g.copies.groups, row_tile);
  const auto first = m.lane_idx() * 4 + column;
  for (int i = 0; i < C::kRows / C::kWarps; ++i) {
    const int inside = m.warp_idx() * (C::kRows / C::kWarps) + i;
    const bool exists = inside < tile.rows, data = exists && tile.group < g.copies.groups.num_groups;
    if (!C::kCopies && !exists) break;
    F gate[4], up[4], y[4];
    load_pairs<C::kInput>(m, g.h, tile.row + inside, first, data, gate, up);
    for (int j = 0; j < 4; ++j) {
      const Terms<F> t = terms(m, g.activation, gate[j], up[j]);
      y[j] = data ? t.gate * t.up : F{};
    }
    U words[C::kElementBytes];
    from_floats<C::kInput>(m, y, words);
    if constexpr (C::kCopies)
      put_in_tile<C>(m, m.template shared<shared<C>>(), inside, m.lane_idx() * 4, words);
    else
      store_words<C::kElementBytes>(m, g.out + (tile.row + inside) * g.out_row_bytes, first, g.h.width, g.out_aligned,
                                    true, words);
  }
  if constexpr (C::kCopies) {
    m.syncwarp();  // a warp takes from the tile what it put there
    quantize_tile<C>(m, g.copies, m.template shared<shared<C>>(), tile, row_tile, column,
                     smaller(g.h.width - column, C::kColumns));
  }
}

MXMOE_LAUNCHABLE("swiglu", shared<C>)

inline Pairs pairs_of(const Tensor& h, bool interleaved) {
  return {h.ptr<uint8_t>(), h.strides[0] * bytes_of(h.dtype), static_cast<int>(h.sizes[1] / 2), interleaved,
          in_fours(h) && h.sizes[1] % 8 == 0};
}

// h (N, 2F); offs (E,) or none; out (N, F) of h's dtype, or none and copies of E.
template <typename E, class L>
void launch(L& l, const Tensor& h, const Tensor& offs, const Activation& activation, bool interleaved, bool floor,
            const Tensor& out, const CopyTensors& row, const CopyTensors& column) {
  globals<typename L::machine> g{};
  g.h = pairs_of(h, interleaved), g.activation = activation;
  g.copies = copies_of(groups_of(offs, 1, h.sizes[0]), g.h.width, false, floor, row, column);
  g.out = out.ptr<uint8_t>(), g.out_row_bytes = out.strides[0] * bytes_of(h.dtype), g.out_aligned = in_fours(out);
  with_input(h.dtype, [&]<Input kInput>() {
    using C = config<E, kInput>;
    l.template run<launchable<C>>(row_tiles(g.copies.groups) * ceil_div(g.h.width, C::kColumns), g,
                                  written({{"h", h}, {"offs", offs}}, out, row, column));
  });
}

}  // namespace mxmoe::cuda::swiglu
