// quantize: every format, axis, scope and option of docs/numerics.md, one copy at a time, where quantize.h and
// quantize_nvfp4.h have no faster way.
//
// A lane has a block to itself: 32 lines of a warp, block after block. Transform, scale, random words and codes are
// then arithmetic in registers; only tiles of block_2d ask other lanes. NVFP4's global scales come from a launch
// before.
#pragma once
#include "cuda/kernels/arithmetic.h"
#include "cuda/kernels/elements.h"
#include "cuda/kernels/scaled_copy.h"

namespace mxmoe::cuda::quantize_blocks {

enum class Phase : uint8_t { kGlobalScale, kCodes };

template <Phase kThePhase, Format kTheFormat>
struct config {
  static constexpr Phase kPhase = kThePhase;
  using Facts = FormatFacts<kTheFormat>;
  using Element = typename Facts::Element;
  static constexpr int kWarps = 4, kColumns = 128, kBlock = Facts::kBlock;
  static constexpr int kCodesOfWord = 32 / Element::kBits, kWords = kBlock / kCodesOfWord;
  static constexpr bool kGlobal = Facts::kGlobalScale, kFp4 = Element::kBits == 4;
};

struct shared {
  uint32_t amax[4];  // of the warps
};

struct Options {
  bool floor, hadamard, four_six, block_2d, stochastic;
  uint64_t seed;
  uint32_t stream;
};

template <class M>
struct globals {
  const uint8_t* x;  // rows of all matrices, row_stride elements apart
  int64_t row_stride;
  Input input;
  Groups groups;
  ScaledCopy copy;
  Options options;
};

// A block of every lane: lines first_line + lane of the tile's rows, or of its columns; `position` on along the others.
struct Block {
  int64_t column;  // of the source
  int first_line, position;
};

template <Input kInput, int kCount, class M, class F, class I, class P>
MXMOE_KERNEL void load_elements(M& m, const uint8_t* base, I offset, int64_t step, int count, P exists,
                                F (&x)[kCount]) {
  using Element = std::conditional_t<kInput == Input::kF32, uint32_t, uint16_t>;
  unrolled<kCount>([&](int i) {
    const auto word = m.template ld_global<Element>(base + i * step, offset, exists & (m.splat(i) < count));
    x[i] = to_float<kInput, 0>(m, m.template cast<uint32_t>(word));
  });
}

// Zero where there is nothing.
template <class C, class M, class F>
MXMOE_KERNEL void load(M& m, const globals<M>& g, const RowTile& tile, const Block& at, F (&x)[C::kBlock]) {
  const int bytes = bytes_of(g.input);
  const bool column = g.copy.column;
  const auto line = m.lane_idx() + at.first_line;
  const int rows = tile.group < g.groups.num_groups ? tile.rows : 0;
  const auto columns = static_cast<int>(g.copy.length - at.column);
  const uint8_t* base =
      g.x + ((tile.row + (column ? at.position : 0)) * g.row_stride + at.column + (column ? 0 : at.position)) * bytes;
  const auto offset = line * (column ? bytes : static_cast<int>(g.row_stride) * bytes);
  const auto exists = line < (column ? columns : rows);
  const int count = (column ? rows : columns) - at.position;
  const int64_t step = column ? g.row_stride * bytes : bytes;
  if (g.input == Input::kF32) load_elements<Input::kF32>(m, base, offset, step, count, exists, x);
  if (g.input == Input::kBF16) load_elements<Input::kBF16>(m, base, offset, step, count, exists, x);
  if (g.input == Input::kF16) load_elements<Input::kF16>(m, base, offset, step, count, exists, x);
  if (!g.options.hadamard) return;
  unrolled<C::kBlock>([&](int i) { x[i] = kHadamardSigns >> i % kHadamardSize & 1 ? -x[i] : x[i]; });
  unrolled<4>([&](int power) {
    const int stride = 1 << power;
    unrolled<C::kBlock / 2>([&](int i) {
      const int low = i / stride * 2 * stride + i % stride;
      const F a = x[low], b = x[low + stride];
      x[low] = a + b, x[low + stride] = a - b;
    });
  });
  unrolled<C::kBlock>([&](int i) { x[i] = x[i] * kHadamardScale; });
}

template <class C, class M, class F>
MXMOE_KERNEL auto largest(M&, const F (&x)[C::kBlock]) {
  using U = typename M::template lane<uint32_t>;
  U amax = {};
  for (int i = 0; i < C::kBlock; ++i) amax = larger(amax, __builtin_bit_cast(U, x[i]) & 0x7fffffffu);
  return amax;
}

// fl(|x| / (scale * s_dec)); 0 of a scale that is 0.
template <class M, class F, class U>
MXMOE_KERNEL U nvfp4_ratio(M& m, F x, U scale, F unit) {
  const F ratio = m.divide(__builtin_bit_cast(F, __builtin_bit_cast(U, x) & 0x7fffffffu), unit);
  return scale == 0u ? U{} : __builtin_bit_cast(U, ratio);
}

// Sum of squares of what the block, or its tile, loses with this scale: over a line by a tree, then over the tile's
// lines. In a column copy a lane has a column, and the lines are the tile's rows all the same.
template <class C, class M, class F, class U>
MXMOE_KERNEL F squared_error(M& m, const globals<M>& g, const F (&x)[C::kBlock], U scale, F s_dec) {
  static_assert(C::kBlock == 16, "a tree 8, 4, 2, 1");
  F e[C::kBlock];
  const F value = __builtin_bit_cast(F, decode_magnitude<E4M3, F, U>(scale)), unit = value * s_dec;
  for (int i = 0; i < C::kBlock; ++i) {
    const U code = encode_nearest<typename C::Element, F, U>(nvfp4_ratio(m, x[i], scale, unit));
    const F decoded = __builtin_bit_cast(F, decode_magnitude<typename C::Element, F, U>(code)) * value * s_dec;
    const F off = decoded - __builtin_bit_cast(F, __builtin_bit_cast(U, x[i]) & 0x7fffffffu);
    e[i] = off * off;
  }
  const auto over_lanes = [&](F sum) {
    for (int stride = C::kBlock / 2; stride; stride /= 2) sum = sum + m.shfl_xor(sum, stride);
    return sum;
  };
  if (g.options.block_2d && g.copy.column)
    for (int i = 0; i < C::kBlock; ++i) e[i] = over_lanes(e[i]);
  unrolled<4>([&](int power) {
    unrolled<8>([&](int i) {
      const int half = 8 >> power;
      if (i < half) e[i] = e[i] + e[i + half];
    });
  });
  return g.options.block_2d && !g.copy.column ? over_lanes(e[0]) : e[0];
}

template <class C, class M, class F, class U>
MXMOE_KERNEL U nvfp4_scale(M& m, const globals<M>& g, const F (&x)[C::kBlock], U amax, F s_dec) {
  const auto of = [&](float largest_element) {
    const F wanted = m.divide(m.divide(__builtin_bit_cast(F, amax), m.splat(largest_element)), s_dec);
    return encode_nearest<E4M3, F, U>(__builtin_bit_cast(U, wanted));
  };
  const U s6 = of(6.0f);
  if (!g.options.four_six) return s6;
  const U s4 = of(4.0f);
  const F error6 = squared_error<C>(m, g, x, s6, s_dec), error4 = squared_error<C>(m, g, x, s4, s_dec);
  return error4 < error6 ? s4 : s6;
}

// The codes of a block that has so many elements, and its scale byte.
template <class C, class M, class F, class U, class Index>
MXMOE_KERNEL U encode(M& m, const globals<M>& g, const F (&x)[C::kBlock], F s_dec, Index first, int64_t step,
                      int elements, U (&words)[C::kWords]) {
  using E = typename C::Element;
  U amax = largest<C>(m, x);
  for (int lanes = 1; g.options.block_2d && lanes < C::kBlock; lanes *= 2) amax = larger(amax, m.shfl_xor(amax, lanes));
  U scale, poisoned;
  F factor;
  if constexpr (C::kGlobal) {
    scale = nvfp4_scale<C>(m, g, x, amax, s_dec);
    factor = __builtin_bit_cast(F, decode_magnitude<E4M3, F, U>(scale)) * s_dec;
    poisoned = s_dec == s_dec ? U{} : U{} + 1u;
  } else {
    scale = g.options.floor ? scale_floor<E, U>(amax) : scale_rceil<E, F, U>(amax);
    factor = __builtin_bit_cast(F, e8m0_inverse_bits<U>(scale));
    poisoned = scale == 255u ? U{} + 1u : U{};
  }
  for (int i = 0; i < C::kWords; ++i) words[i] = U{};
  unrolled<C::kBlock>([&](int i) {
    const U sign = __builtin_bit_cast(U, x[i]) >> 31 << (E::kBits - 1);
    U magnitude;
    if constexpr (C::kGlobal)
      magnitude = nvfp4_ratio(m, x[i], scale, factor);
    else
      magnitude = __builtin_bit_cast(U, x[i] * factor) & 0x7fffffffu;
    U code;
    if (g.options.stochastic)
      code = encode_stochastic<E, U>(magnitude, random_word(m, g.options.seed, first + i * step, g.options.stream));
    else
      code = encode_nearest<E, F, U>(magnitude);
    code = C::kGlobal ? (scale == 0u ? U{} : code | sign) : code | sign;
    code = poisoned != 0u ? U{} + E::kPoison : code;
    if (i >= elements) code = U{};  // padding
    words[i / C::kCodesOfWord] = words[i / C::kCodesOfWord] | code << (i % C::kCodesOfWord * E::kBits);
  });
  if constexpr (C::kGlobal) scale = poisoned != 0u ? U{} + kNvfp4Poison : scale;
  return scale;
}

template <class C, class M, class U>
MXMOE_KERNEL void store(M& m, const globals<M>& g, const RowTile& tile, int64_t row_tile, const Block& at,
                        const U (&words)[C::kWords], U scale) {
  const ScaledCopy& c = g.copy;
  const auto line = m.lane_idx() + at.first_line;
  const auto columns = static_cast<int>(c.length - at.column);
  const int64_t blocks = ceil_div(c.contraction, C::kBlock);
  if (!c.column) {
    const int64_t row_bytes = C::kFp4 ? ceil_div(c.length, 2) : c.length, column = at.column + at.position;
    const int64_t byte = C::kFp4 ? column / 2 : column;
    const auto writes = line < tile.rows;
    for (int i = 0; i < C::kWords; ++i)
      store_bytes(m, c.values + tile.row * row_bytes + byte, line * static_cast<int>(row_bytes) + 4 * i, words[i],
                  m.splat(static_cast<int>(row_bytes - byte) - 4 * i), row_bytes % 4 == 0, writes);
    m.template st_global<uint8_t>(c.scales + tile.row * blocks + column / C::kBlock, line * static_cast<int>(blocks),
                                  m.template cast<uint8_t>(scale), writes);
    return;
  }
  const int64_t position = c.start(tile, row_tile) + at.position, first_line = c.matrix(tile) * c.length + at.column;
  const auto writes = line < columns;
  const auto left = static_cast<int>(c.contraction - position);  // elements
  if constexpr (C::kFp4) {
    const int64_t line_bytes = ceil_div(c.contraction, 2);
    for (int i = 0; i < C::kWords; ++i)
      store_bytes(m, c.values + first_line * line_bytes + position / 2, line * static_cast<int>(line_bytes) + 4 * i,
                  words[i], m.splat((left + 1) / 2 - 4 * i), line_bytes % 4 == 0, writes);
  } else {
    uint8_t* to = c.values + (c.row(tile, row_tile) + at.position) * c.length + at.column;
    unrolled<C::kBlock>([&](int i) {
      if (i < left)
        m.template st_global<uint8_t>(to + i * c.length, line, m.template cast<uint8_t>(words[i / 4] >> (8 * (i % 4))),
                                      writes);
    });
  }
  m.template st_global<uint8_t>(c.scales + first_line * blocks + position / C::kBlock, line * static_cast<int>(blocks),
                                m.template cast<uint8_t>(scale), writes);
}

// A tile of 128 rows x 128 columns: blocks of 32 lines of each warp.
template <class C, class M>
MXMOE_KERNEL void codes(M& m, const globals<M>& g) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  const int column_tiles = static_cast<int>(ceil_div(g.copy.length, C::kColumns));
  const int64_t row_tile = m.cta_idx() / column_tiles;
  Block at{int64_t{m.cta_idx() % column_tiles} * C::kColumns, m.warp_idx() * 32, 0};
  const RowTile tile = find_row_tile(m, g.groups, row_tile);
  const bool data = tile.group < g.groups.num_groups;
  const int64_t start = g.copy.start(tile, row_tile);
  const int64_t end = g.copy.column ? g.copy.contraction - start : g.copy.length - at.column;
  const int64_t first_row = g.groups.offs ? (row_tile - tile.first_tile) * kTileRows : tile.row;  // random words begin
  for (at.position = 0; at.position < kTileRows && at.position < end; at.position += C::kBlock) {
    F x[C::kBlock], s_dec = F{} + 1.0f;
    load<C>(m, g, tile, at, x);
    const bool exists = data && (!g.copy.column || at.position < tile.rows);
    if constexpr (C::kGlobal) {
      const auto line = m.lane_idx() + at.first_line;
      const float* global = g.copy.global + g.copy.global_index(tile);
      if (exists)
        s_dec = g.copy.scope == Scope::kRow ? m.template ld_global<float>(global, line * 4, line < tile.rows)
                                            : m.template ld_global<float>(global, line * 0, line >= 0);
    }
    const auto lane = m.template cast<int64_t>(m.lane_idx() + at.first_line);
    const auto word = g.copy.column ? (lane + at.column) + (first_row + at.position) * g.copy.length
                                    : (lane + first_row) * g.copy.length + (at.column + at.position);
    U words[C::kWords];
    const int elements = !data ? 0 : g.copy.column ? tile.rows - at.position : C::kBlock;
    const U scale = encode<C>(m, g, x, s_dec, word, g.copy.column ? g.copy.length : 1, elements, words);
    store<C>(m, g, tile, row_tile, at, words, scale);
  }
}

// The largest magnitude of a tile of 128 rows x 128 columns, of each lane's line where `of_lines`.
template <class C, class M, class U>
MXMOE_KERNEL U largest_of(M& m, const globals<M>& g, const RowTile& tile, int64_t column, U amax) {
  typename M::template lane<float> x[C::kBlock];
  const int64_t end = g.copy.column ? tile.rows : g.copy.length - column;
  Block at{column, m.warp_idx() * 32, 0};
  for (; at.position < kTileRows && at.position < end; at.position += C::kBlock) {
    load<C>(m, g, tile, at, x);
    amax = larger(amax, largest<C>(m, x));
  }
  return amax;
}

// A CTA for 128 rows (scope row), for a group, or for all.
template <class C, class M>
MXMOE_KERNEL void global_scale(M& m, const globals<M>& g) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  auto& s = m.template shared<shared>();
  const Scope scope = g.copy.scope;
  int64_t tile_idx = scope == Scope::kRow ? m.cta_idx() : 0;
  U amax = {};
  RowTile tile = find_row_tile(m, g.groups, tile_idx);
  for (;; tile = find_row_tile(m, g.groups, ++tile_idx)) {
    if (tile.group == g.groups.num_groups) break;
    if (scope == Scope::kGroup && tile.group > m.cta_idx()) break;
    if (scope == Scope::kGroup && tile.group < m.cta_idx()) continue;
    for (int64_t column = 0; column < g.copy.length; column += C::kColumns)
      amax = largest_of<C>(m, g, tile, column, amax);
    if (scope == Scope::kRow) break;
  }
  const auto one = m.elect_one();
  const auto line = m.lane_idx() + m.warp_idx() * 32;
  if (scope != Scope::kRow) {
    m.st_shared(m.template cast<uint32_t>(m.lane_idx() * 4) + m.shared_address(&s.amax[m.warp_idx()]),
                m.splat(m.redux_max(amax)), one);
    m.syncthreads();
    for (int i = 0; i < C::kWarps; ++i) amax = larger(amax, m.splat(m.ld_shared_uniform(m.shared_address(&s.amax[i]))));
  }
  F s_dec = m.divide(__builtin_bit_cast(F, amax), m.splat(g.options.four_six ? kNvfp4FourSixAmax : kNvfp4Amax));
  s_dec = s_dec == 0.0f ? F{} + 1.0f : s_dec;
  U bits = amax < kInfBits ? __builtin_bit_cast(U, s_dec) : U{} + kNanBits;
  if (scope == Scope::kRow) {
    if (tile.group == g.groups.num_groups) bits = U{};
    m.template st_global<uint32_t>(g.copy.global + tile.row, line * 4, bits, line < tile.rows);
  } else if (m.warp_idx() == 0) {
    m.template st_global<uint32_t>(g.copy.global + m.cta_idx(), m.lane_idx() * 4, bits, one);
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  m.role("quantize");
  if constexpr (C::kPhase == Phase::kGlobalScale)
    global_scale<C>(m, g);
  else
    codes<C>(m, g);
}

MXMOE_LAUNCHABLE("quantize_blocks", shared)

// x (B, R, L), rows of unit stride, matrices R rows apart; offs (E,) with B = 1, or none. One copy, scales plain.
template <Format kFormat, class L>
void launch(L& l, const Tensor& x, const Tensor& offs, const Options& options, bool column, Scope scope,
            const Tensor& values, const Tensor& scales, const Tensor& global) {
  globals<typename L::machine> g{};
  const int64_t batch = x.sizes[0], rows = x.sizes[1], length = x.sizes[2];
  g.x = x.ptr<uint8_t>(), g.row_stride = x.strides[1];
  with_input(x.dtype, [&]<Input kInput>() { g.input = kInput; });
  const int64_t groups = offs ? offs.sizes[0] : batch;
  g.groups = {offs.ptr<int32_t>(), static_cast<int>(groups), static_cast<int>(rows), batch * rows};
  g.copy = scaled_copy_of(offs, rows, length, column, scope, values, scales, global);
  g.options = options;
  const int64_t tiles = offs ? padded_rows(rows, groups + 1) / kTileRows : batch * ceil_div(rows, kTileRows);
  if constexpr (FormatFacts<kFormat>::kGlobalScale)
    l.template run<launchable<config<Phase::kGlobalScale, kFormat>>>(
        scope == Scope::kRow ? tiles : global.sizes[0], g,
        {{"x", x}, {"offs", offs}, {"global scale", global, Use::kWritten}});
  l.template run<launchable<config<Phase::kCodes, kFormat>>>(tiles * ceil_div(length, 128), g,
                                                             {{"x", x},
                                                              {"offs", offs},
                                                              {"global scale", global},
                                                              {"values", values, Use::kWritten},
                                                              {"scales", scales, Use::kWritten}});
}

}  // namespace mxmoe::cuda::quantize_blocks
