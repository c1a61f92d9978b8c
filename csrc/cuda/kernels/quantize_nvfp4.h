// quantize: NVFP4 row copies with one FP32 scale per row (scope "row"). The bits are docs/numerics.md's: IEEE
// divisions.
//
// A warp takes one row at a time and reads it twice: for its largest magnitude, then, from L2, for its blocks. Lanes
// hold eight elements each, two lanes a block. Rows are numbered as groups padded to 128, so that padding lines of the
// blocked scale layout are written too.
#pragma once
#include "cuda/kernels/groups.h"
#include "cuda/kernels/quantize_tile.h"
#include "cuda/launch.h"
#include "cuda/tile/types.h"
#include "formats.h"
#include "layout.h"

namespace mxmoe::cuda::quantize_nvfp4 {

template <Input kInputType>
struct config {
  static constexpr Input kInput = kInputType;
  static constexpr int kElementBytes = kInput == Input::kF32 ? 4 : 2;
  static constexpr int kWarps = 4, kRowsOfWarp = 8, kLaneElements = 8, kStep = 32 * kLaneElements, kBlock = 16;
};

struct shared {};

template <class M>
struct globals {
  const uint8_t* x;  // rows of zero-padded 16-byte pieces
  int64_t row_bytes;
  Groups groups;
  int padded_length;  // elements of a row of x
  int value_bytes, blocks;
  uint8_t *values, *scales;  // (rows, value_bytes); plain (rows, blocks) or blocked
  float* global;             // (rows,)
  bool blocked;
};

// Elements [8 lane, 8 lane + 8) of a step, zero past the row.
template <class C, class M, class F, class I>
MXMOE_KERNEL void load(M& m, const uint8_t* row, I first, int length, F (&x)[8]) {
  constexpr int kWords = 8 * C::kElementBytes / 16;
  for (int v = 0; v < kWords; ++v) {
    typename M::template registers<uint32_t, 4> words;
    m.ld_global_v4(words, row, first * C::kElementBytes + 16 * v, first < length);
    for (int j = 0; j < 4; ++j) {
      if constexpr (kWords == 2) {
        x[4 * v + j] = to_float<C::kInput, 0>(m, words[j]);
      } else {
        x[2 * j] = to_float<C::kInput, 0>(m, words[j]), x[2 * j + 1] = to_float<C::kInput, 1>(m, words[j]);
      }
    }
  }
}

// One step of a row whose global scale is `s_dec`; `data` false: a row without values, all of whose bytes are 0.
template <class C, class M>
MXMOE_KERNEL void quantize_step(M& m, const globals<M>& g, int64_t row, int64_t line, int step, bool data, bool writes,
                                bool in_bound, bool poisoned, typename M::template lane<float> s_dec) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  using I = typename M::template lane<int>;
  const I lane = m.lane_idx(), first = lane * C::kLaneElements + step, block = first / C::kBlock;
  F x[8] = {};
  if (data) load<C>(m, g.x + row * g.row_bytes, first, g.padded_length, x);
  U amax = {}, magnitude[8], sign[8];
  for (int j = 0; j < 8; ++j) {
    const U bits = __builtin_bit_cast(U, x[j]);
    magnitude[j] = bits & 0x7fffffffu, sign[j] = bits >> 31 << 3;
    amax = larger(amax, magnitude[j]);
  }
  amax = larger(amax, m.shfl_xor(amax, 1));
  const F six = m.splat(6.0f);
  const F wanted = m.divide(m.divide(__builtin_bit_cast(F, amax), six), s_dec);
  U scale = encode_nearest<E4M3, F, U>(__builtin_bit_cast(U, wanted));
  const F unit = __builtin_bit_cast(F, decode_magnitude<E4M3, F, U>(scale)) * s_dec;
  U codes = {};
  for (int j = 0; j < 8; ++j) {
    const F ratio = m.divide(__builtin_bit_cast(F, magnitude[j]), unit);
    codes = codes | (encode_nearest<E2M1, F, U>(__builtin_bit_cast(U, ratio)) | sign[j]) << (4 * j);
  }
  codes = scale == 0u ? U{} : codes;
  if (poisoned) codes = U{}, scale = U{} + kNvfp4Poison;
  scale = block < g.blocks ? scale : U{};

  if (writes)
    store_bytes(m, g.values + row * g.value_bytes, first / 2, codes, m.splat(g.value_bytes) - first / 2,
                g.value_bytes % 4 == 0, first >= 0);
  U four = scale << (m.template cast<uint32_t>(lane / 2 % 4) * 8u);  // of lanes 8i to 8i + 7
  four = four | m.shfl_xor(four, 2);
  four = four | m.shfl_xor(four, 4);
  const auto leads = lane % 8 == 0;
  if (!g.blocked) {
    if (writes)
      store_bytes(m, g.scales + row * g.blocks, block, four, m.splat(g.blocks) - block, g.blocks % 4 == 0, leads);
  } else if (in_bound) {
    const I tile = lane / 8,
            tiles_left = m.splat(static_cast<int>(ceil_div(g.blocks, 4)) - step / (4 * C::kBlock)) - tile;
    uint8_t* base = g.scales + blocked_offset(line, step / C::kBlock, g.blocks);
    m.template st_global<uint32_t>(base, tile * static_cast<int>(kScaleTileBytes), four, leads & (tiles_left > 0));
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  m.role("quantize");
  const int64_t first_line = (int64_t{m.cta_idx()} * C::kWarps + m.warp_idx()) * C::kRowsOfWarp;
  const RowTile tile = find_row_tile(m, g.groups, first_line / kTileRows);
  const bool in_bound = !g.groups.offs || first_line < padded_rows(g.groups.num_rows, g.groups.num_groups);
  for (int i = 0; i < C::kRowsOfWarp; ++i) {
    const int64_t line = first_line + i;
    const int inside = static_cast<int>(line % kTileRows);
    const bool writes = inside < tile.rows, data = writes && tile.group < g.groups.num_groups;
    const int64_t row = tile.row + inside;
    U amax = {};
    for (int step = 0; data && step < g.padded_length; step += C::kStep) {
      F x[8];
      load<C>(m, g.x + row * g.row_bytes, m.lane_idx() * C::kLaneElements + step, g.padded_length, x);
      for (int j = 0; j < 8; ++j) amax = larger(amax, __builtin_bit_cast(U, x[j]) & 0x7fffffffu);
    }
    for (int lanes = 1; lanes < 32; lanes *= 2) amax = larger(amax, m.shfl_xor(amax, lanes));
    const bool poisoned = m.any(amax >= kInfBits);
    F s_dec = m.divide(__builtin_bit_cast(F, amax), m.splat(kNvfp4Amax));
    s_dec = s_dec == 0.0f ? F{} + 1.0f : s_dec;
    for (int step = 0; step < static_cast<int>(round_up(g.blocks, 4)) * C::kBlock; step += C::kStep)
      quantize_step<C>(m, g, row, line, step, data, writes, in_bound, poisoned, s_dec);
    U bits = poisoned ? U{} + kNanBits : __builtin_bit_cast(U, s_dec);
    if (!data) bits = U{};
    if (writes) m.template st_global<uint32_t>(g.global + row, m.lane_idx() * 4, bits, m.elect_one());
  }
}

MXMOE_LAUNCHABLE("quantize_nvfp4", shared)

// x (B, R, a multiple of 8, zeros past the row's length), rows 16 bytes apart; offs (E,) with B = 1, or none.
template <class L>
void launch(L& l, const Tensor& x, const Tensor& offs, bool blocked, const Tensor& values, const Tensor& scales,
            const Tensor& global) {
  globals<typename L::machine> g{};
  g.x = x.ptr<uint8_t>(), g.row_bytes = x.strides[1] * bytes_of(x.dtype);
  g.groups = groups_of(offs, x.sizes[0], x.sizes[1]);
  g.padded_length = static_cast<int>(x.sizes[2]);
  g.value_bytes = static_cast<int>(values.sizes[values.ndim - 1]);
  g.blocks = static_cast<int>(ceil_div(g.value_bytes, 8));
  g.values = values.ptr<uint8_t>(), g.scales = scales.ptr<uint8_t>(), g.global = global.ptr<float>();
  g.blocked = blocked;
  const int64_t ctas =
      row_tiles(g.groups) * (kTileRows / (config<Input::kF32>::kWarps * config<Input::kF32>::kRowsOfWarp));
  with_input(x.dtype, [&]<Input kInput>() {
    l.template run<launchable<config<kInput>>>(ctas, g,
                                               {{"x", x},
                                                {"offs", offs},
                                                {"values", values, Use::kWritten},
                                                {"scales", scales, Use::kWritten},
                                                {"global scale", global, Use::kWritten}});
  });
}

}  // namespace mxmoe::cuda::quantize_nvfp4
