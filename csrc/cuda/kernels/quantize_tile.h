// A tile of 128 rows x 128 columns in shared memory -> its part of the row copy, of the column copy or of both, in
// 8-bit MX formats. quantize brings the tile by TMA; other kernels compute it there.
//
// Every warp makes 32 rows of the row copy and one block row of the column copy. The tile's block scales are 512 bytes
// of each copy's blocked layout, staged in shared memory and written as such, or as plain (line, block) scales. The
// bits are docs/numerics.md's.
#pragma once
#include <vector>

#include "cuda/kernels/elements.h"
#include "cuda/kernels/groups.h"
#include "cuda/launch.h"
#include "cuda/tile/types.h"
#include "formats.h"
#include "layout.h"

namespace mxmoe::cuda {

// For kernels that may write their result itself in the place of copies.
struct NoCopies {
  static constexpr int kBits = 8;
};

// E: the copies' element. kInput: what the tile holds.
template <typename E, Input kInputType>
struct tile_config {
  using Element = E;
  static constexpr bool kCopies = !std::is_same_v<E, NoCopies>;
  static constexpr Input kInput = kInputType;
  static constexpr int kRows = kTileRows, kColumns = 128, kBlock = 32, kWarps = 4;
  static constexpr int kElementBytes = bytes_of(kInput);
  static_assert(E::kBits == 8, "a 4-bit column copy is transposed, which these kernels are not made for");
};

struct Copy {
  uint8_t *values, *scales;
};

struct Copies {
  Groups groups;
  int64_t length;
  Copy row, column;     // without values where not wanted
  bool blocked, floor;  // layout of the scales; rounding of MX scales (else rceil)
};

// CTAs along the rows: a static bound of the tiles of any groups, and of the rows past them.
inline int64_t row_tiles(const Groups& g) {
  if (!g.offs) return g.num_groups * ceil_div(g.group_rows, kTileRows);
  return padded_rows(g.num_rows, g.num_groups + 1) / kTileRows;
}

template <class C>
struct tile_shared {
  st<C::kRows, C::kColumns * C::kElementBytes> x;
  scale_tile row_scales, column_scales;
};

struct nothing {};
template <class C>
using tile_or_nothing = std::conditional_t<C::kCopies, tile_shared<C>, nothing>;

// Four elements of each lane to row `row` of the tile, from column `at` on.
template <class C, class M, class I, class U, class P>
MXMOE_KERNEL void put_in_tile(M& m, tile_shared<C>& s, int row, I at, const U (&word)[C::kElementBytes], P writes) {
  const U address =
      m.template cast<uint32_t>(at * C::kElementBytes + row * static_cast<int>(s.x.row_bytes)) + m.shared_address(&s.x);
  if constexpr (C::kElementBytes == 2) m.st_shared_v2(address, word[0], word[1], writes);
  if constexpr (C::kElementBytes == 4) m.st_shared_v4(address, word[0], word[1], word[2], word[3], writes);
}
template <class C, class M, class I, class U>
MXMOE_KERNEL void put_in_tile(M& m, tile_shared<C>& s, int row, I at, const U (&word)[C::kElementBytes]) {
  put_in_tile<C>(m, s, row, at, word, m.lane_idx() >= 0);
}

template <class C, class M, class U>
MXMOE_KERNEL U scale_of(U amax, bool floor) {
  using F = typename M::template lane<float>;
  return floor ? scale_floor<typename C::Element, U>(amax) : scale_rceil<typename C::Element, F, U>(amax);
}

// Two elements as two bytes, each of a block with its scale byte; where that is 255 the element is poisoned.
template <class C, class M, class F, class U>
MXMOE_KERNEL U encode_pair(M& m, F low, F high, U low_scale, U high_scale) {
  constexpr uint32_t kPoison = C::Element::kPoison;
  low = low * __builtin_bit_cast(F, e8m0_inverse_bits<U>(low_scale));
  high = high * __builtin_bit_cast(F, e8m0_inverse_bits<U>(high_scale));
  U codes;
  if constexpr (C::Element::kMaxCode == E4M3::kMaxCode)
    codes = m.cvt_e4m3x2(low, high);
  else
    codes = m.cvt_e5m2x2(low, high);
  codes = low_scale == 255u ? (codes & 0xff00u) | kPoison : codes;
  return high_scale == 255u ? (codes & 0xffu) | kPoison << 8 : codes;
}

template <class M, class C>
MXMOE_KERNEL void row_pass(M& m, const Copies& g, tile_shared<C>& s, RowTile tile, int64_t column, int columns,
                           bool data) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  using I = typename M::template lane<int>;
  constexpr int kLaneElements = 8, kRowLanes = C::kColumns / kLaneElements, kRowsAtOnce = 32 / kRowLanes;
  constexpr int kWords = kLaneElements * C::kElementBytes / 16;  // vectors of four
  const I lane = m.lane_idx(), chunk = lane % kRowLanes;
  const I columns_left = m.splat(columns) - chunk * kLaneElements;
  for (int i = 0; i < C::kRows / C::kWarps / kRowsAtOnce; ++i) {
    const I row = (m.warp_idx() * (C::kRows / C::kWarps) + i * kRowsAtOnce) + lane / kRowLanes;
    const auto exists = (row < tile.rows) & (m.splat(data ? 1 : 0) != 0);
    F x[kLaneElements];
    U amax = {};
    for (int v = 0; v < kWords; ++v) {
      typename M::template registers<uint32_t, 4> words;
      const I at = row * static_cast<int>(s.x.row_bytes) + chunk * (kLaneElements * C::kElementBytes) + 16 * v;
      m.ld_shared_v4(words, m.template cast<uint32_t>(at) + m.shared_address(&s.x));
      for (int j = 0; j < 4; ++j) {
        const U word = exists ? words[j] : U{};  // rows of the next group
        if constexpr (C::kElementBytes == 4) {
          x[4 * v + j] = to_float<C::kInput, 0>(m, word);
        } else {
          x[2 * j] = to_float<C::kInput, 0>(m, word), x[2 * j + 1] = to_float<C::kInput, 1>(m, word);
        }
      }
    }
    for (int j = 0; j < kLaneElements; ++j) amax = larger(amax, __builtin_bit_cast(U, x[j]) & 0x7fffffffu);
    amax = larger(amax, m.shfl_xor(amax, 1));
    amax = larger(amax, m.shfl_xor(amax, 2));
    const U scale = scale_of<C, M>(amax, g.floor);
    U words[2];
    for (int j = 0; j < 2; ++j)
      words[j] = encode_pair<C>(m, x[4 * j], x[4 * j + 1], scale, scale) |
                 encode_pair<C>(m, x[4 * j + 2], x[4 * j + 3], scale, scale) << 16;

    uint8_t* out = g.row.values + tile.row * g.length + column;
    const I offset = row * static_cast<int>(g.length) + chunk * kLaneElements;
    const auto writes = row < tile.rows;
    if (g.length % kLaneElements == 0) {
      m.st_global_v2(out, offset, words[0], words[1], writes & (columns_left > 0));
    } else {
      for (int j = 0; j < 2; ++j) store_bytes(m, out, offset + 4 * j, words[j], columns_left - 4 * j, false, writes);
    }
    U four = scale << (m.template cast<uint32_t>(chunk / 4) * 8u);
    four = four | m.shfl_xor(four, 4);
    four = four | m.shfl_xor(four, 8);
    const I at = row % 32 * 16 + row / 32 * 4;
    m.st_shared(m.template cast<uint32_t>(at) + m.shared_address(&s.row_scales), four,
                lane >= 0);  // the same word from all
  }
}

template <class M, class C>
MXMOE_KERNEL void column_pass(M& m, const Copies& g, tile_shared<C>& s, RowTile tile, int64_t out_row, int out_rows,
                              int64_t column, int columns, bool data) {
  using U = typename M::template lane<uint32_t>;
  using F = typename M::template lane<float>;
  using I = typename M::template lane<int>;
  constexpr int kLaneColumns = 4, kWords = C::kElementBytes;  // words of a lane in a row
  const I lane = m.lane_idx();
  const int first = m.warp_idx() * C::kBlock;  // row in the tile
  const int valid = data ? tile.rows : 0;
  const auto load = [&](int row, F(&x)[kLaneColumns]) {
    typename M::template registers<uint32_t, kWords> words;
    const U at =
        m.template cast<uint32_t>(lane * (kLaneColumns * C::kElementBytes) + row * static_cast<int>(s.x.row_bytes));
    if constexpr (kWords == 4) {
      m.ld_shared_v4(words, at + m.shared_address(&s.x));
      for (int j = 0; j < 4; ++j) x[j] = to_float<C::kInput, 0>(m, words[j]);
    } else {
      m.ld_shared_v2(words, at + m.shared_address(&s.x));
      for (int j = 0; j < 2; ++j)
        x[2 * j] = to_float<C::kInput, 0>(m, words[j]), x[2 * j + 1] = to_float<C::kInput, 1>(m, words[j]);
    }
  };
  U amax[kLaneColumns] = {};
  for (int i = 0; i < C::kBlock && first + i < valid; ++i) {
    F x[kLaneColumns];
    load(first + i, x);
    for (int j = 0; j < kLaneColumns; ++j) amax[j] = larger(amax[j], __builtin_bit_cast(U, x[j]) & 0x7fffffffu);
  }
  U scale[kLaneColumns];
  for (int j = 0; j < kLaneColumns; ++j) {
    scale[j] = scale_of<C, M>(amax[j], g.floor);
    const I line = lane * kLaneColumns + j, at = line % 32 * 16 + line / 32 * 4 + m.warp_idx();
    m.st_shared_u8(m.template cast<uint32_t>(at) + m.shared_address(&s.column_scales), scale[j], lane >= 0);
  }
  const I columns_left = m.splat(columns) - lane * kLaneColumns;
  for (int i = 0; i < C::kBlock && first + i < out_rows; ++i) {
    U word = {};
    if (first + i < valid) {
      F x[kLaneColumns];
      load(first + i, x);
      word = encode_pair<C>(m, x[0], x[1], scale[0], scale[1]) | encode_pair<C>(m, x[2], x[3], scale[2], scale[3])
                                                                     << 16;
    }
    store_bytes(m, g.column.values + (out_row + first + i) * g.length + column, lane * kLaneColumns, word, columns_left,
                g.length % kLaneColumns == 0, lane >= 0);
  }
}

// The 512 bytes of a scale tile: as they are, or as `blocks` plain scales of each of `lines` lines from `base` on.
template <class M>
MXMOE_KERNEL void store_scales(M& m, scale_tile& s, bool blocked, uint8_t* base, int line_stride, int lines,
                               int blocks) {
  using I = typename M::template lane<int>;
  if (blocked) {
    if (m.warp_idx() != 0) return;
    typename M::template registers<uint32_t, 4> words;
    m.ld_shared_v4(words, m.template cast<uint32_t>(m.lane_idx() * 16) + m.shared_address(&s));
    m.st_global_v4(base, m.lane_idx() * 16, words[0], words[1], words[2], words[3], m.lane_idx() >= 0);
  } else {
    const I line = m.warp_idx() * 32 + m.lane_idx(), at = line % 32 * 16 + line / 32 * 4;
    const auto word = m.ld_shared(m.template cast<uint32_t>(at) + m.shared_address(&s));
    store_bytes(m, base, line * line_stride, word, m.splat(blocks), false, line < lines);
  }
}

// The tile of `tile`, the row_tile-th of all, whose first column is `column` and which has `columns` of them. A warp
// reads 32 rows, from the 32nd times its number on.
template <class C, class M>
MXMOE_KERNEL void quantize_tile(M& m, const Copies& g, tile_shared<C>& s, RowTile tile, int64_t row_tile,
                                int64_t column, int columns) {
  const bool grouped = g.groups.offs != nullptr, data = tile.group < g.groups.num_groups;
  const int64_t padded = row_tile * kTileRows;  // where the tile lies once groups are padded
  const bool in_bound = !grouped || padded < padded_rows(g.groups.num_rows, g.groups.num_groups);
  const int out_rows = grouped ? (in_bound ? kTileRows : 0) : tile.rows;
  if (g.row.values) row_pass<M, C>(m, g, s, tile, column, columns, data);
  if (g.column.values) column_pass<M, C>(m, g, s, tile, grouped ? padded : tile.row, out_rows, column, columns, data);
  m.syncthreads();
  if (g.row.values) {
    const int64_t blocks = ceil_div(g.length, C::kBlock);
    const int here = static_cast<int>(ceil_div(columns, C::kBlock));
    if (!g.blocked)
      store_scales(m, s.row_scales, false, g.row.scales + tile.row * blocks + column / C::kBlock,
                   static_cast<int>(blocks), tile.rows, here);
    else if (in_bound)
      store_scales(m, s.row_scales, true, g.row.scales + blocked_offset(padded, column / C::kBlock, blocks), 0, 0, 0);
  }
  if (g.column.values) {
    const int64_t start = tile.first_tile * kTileRows,
                  lines = round_up(g.length, kTileRows);                           // padded start of the group
    const int64_t block = (row_tile - tile.first_tile) * (kTileRows / C::kBlock);  // first one, in the group
    const int64_t blocks = tile.group_tiles * (kTileRows / C::kBlock);             // of the group, padded
    if (!g.blocked) {
      const int64_t all = grouped ? padded_rows(g.groups.num_rows, g.groups.num_groups) / C::kBlock
                                  : ceil_div(g.groups.group_rows, C::kBlock);
      const int64_t first = grouped ? padded / C::kBlock : tile.group * g.length * all + block;
      store_scales(m, s.column_scales, false, g.column.scales + column * all + first, static_cast<int>(all), columns,
                   static_cast<int>(ceil_div(out_rows, C::kBlock)));
    } else if (data) {
      store_scales(m, s.column_scales, true,
                   g.column.scales + lines * start / C::kBlock + blocked_offset(column, block, blocks), 0, 0, 0);
    } else if (in_bound) {  // what no group owns: one tile after the other
      store_scales(m, s.column_scales, true, g.column.scales + lines * padded / C::kBlock + column * 4, 0, 0, 0);
    }
  }
}

struct CopyTensors {
  Tensor values, scales;
};

inline Copies copies_of(const Groups& groups, int64_t length, bool blocked, bool floor, const CopyTensors& row,
                        const CopyTensors& column) {
  return {groups,
          length,
          {row.values.ptr<uint8_t>(), row.scales.ptr<uint8_t>()},
          {column.values.ptr<uint8_t>(), column.scales.ptr<uint8_t>()},
          blocked,
          floor};
}

// `arguments` and what is written: out, or the copies in its place.
inline std::vector<Argument> written(std::vector<Argument> arguments, const Tensor& out, const CopyTensors& row,
                                     const CopyTensors& column) {
  for (const Argument& a : {Argument{"out", out, Use::kWritten},
                            {"row values", row.values, Use::kWritten},
                            {"row scales", row.scales, Use::kWritten},
                            {"column values", column.values, Use::kWritten},
                            {"column scales", column.scales, Use::kWritten}})
    arguments.push_back(a);
  return arguments;
}

// offs (num_groups,), or none: `batch` groups of equal size.
inline Groups groups_of(const Tensor& offs, int64_t batch, int64_t rows) {
  const int64_t groups = offs ? offs.sizes[0] : batch;
  return {offs.ptr<int32_t>(), static_cast<int>(groups), static_cast<int>(rows), batch * rows};
}

}  // namespace mxmoe::cuda
