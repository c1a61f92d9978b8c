// quantize: the array is cut into tasks (a tile of rows x a span of columns), a task into tiles that
// are read once and give both copies. A scope larger than a row takes a pass of its own for its amax.
#include "config.h"
#include "host/emit.h"
#include "host/quantize.h"
#include "host/quantize_bf16.h"
#include "host/quantize_bf16_fp4.h"
#include "host/threads.h"
#include "host/tile.h"
#include "layout.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

constexpr int64_t kSpan = 2048;                   // columns of a task on row copies
constexpr int64_t kManyTiles = 64;                // enough tasks without cutting rows: 2.5 times faster on rows of 7168
constexpr int64_t kStripCols = 512;               // columns of a task on column copies: 32 rows of BF16 stay in L1
constexpr int64_t kAhead = 2048, kRowsAhead = 8;  // elements along a row, rows down a strip: prefetch distances
constexpr float kSmallestGlobal = 0x1p-60f;       // under a smaller one bounds of codes could be subnormal
constexpr int64_t kStripBytes = 2 * kTileRows * kStripCols * 4;  // two parts in FP32

int64_t min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
uint32_t larger(uint32_t a, uint32_t b) {
  return a > b ? a : b;
}

bool aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 64 == 0;
}

void atomic_max(uint32_t* target, uint32_t value) {
  uint32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (seen < value &&
         !__atomic_compare_exchange_n(target, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// s_dec from the bits of the scope's amax.
float global_scale_of(uint32_t amax, bool four_six) {
  if (amax >= kInfBits) return f32_of(kNanBits);
  float scale = f32_of(amax) / (four_six ? kNvfp4FourSixAmax : kNvfp4Amax);
  return scale == 0.0f ? 1.0f : scale;
}

// Elements that are read together: rows [row, row + rows) of a tile of rows (it has valid_rows of them), columns
// [col, col + cols) of the array.
struct Strip {
  const char* data;
  int64_t row_stride, col_stride;  // in elements
  int64_t row, rows, valid_rows, col, cols;
  int part;
};

// Scales of a tile of rows [part][block of 32 rows][column], until they lie side by side in the lines of a column copy.
struct ColumnScales {
  uint8_t bytes[2][4][kStripCols];
};

[[maybe_unused]] void scatter_scales(const uint8_t (*scales)[kStripCols], int blocks, int cols, uint8_t* to,
                                     int64_t line_blocks) {
  for (int c = 0; c < cols; ++c) {
    uint8_t line[4] = {scales[0][c], scales[1][c], scales[2][c], scales[3][c]};
    if (blocks == 4)
      memcpy(to + c * line_blocks, line, 4);
    else
      memcpy(to + c * line_blocks, line, blocks);
  }
}

template <Format kFormat>
class Quantizer {
 public:
  explicit Quantizer(const QuantizeArgs& args)
      : a(args),
        num_rows(a.x.sizes[1]),
        num_cols(a.x.sizes[2]),
        part_cols(num_cols / a.source.parts),
        element_bytes(a.x.dtype == DType::kF32 ? 4 : 2),
        long_rows(!a.column && !a.block_2d && a.x.strides[2] == 1),
        row_scope(Facts::kGlobalScale && a.scope == Scope::kRow),
        in_bf16(a.x.dtype == DType::kBF16 && a.x.strides[2] == 1 && !a.stochastic && !a.hadamard && !a.block_2d),
        stream(bypasses_cache(a.x.sizes[0] * num_rows * num_cols * Facts::Element::kBits / 8) &&
               part_cols * Facts::Element::kBits / 8 % 64 == 0 && aligned(a.row.values) && aligned(a.column.values)) {
    const int64_t padded = num_cols > 0 ? round_up(num_cols, 32) : 32;
    tile_cols = static_cast<int>(long_rows ? min64(padded, kLongElements) : kTileCols);
    tile_rows = static_cast<int>(long_rows ? min64(kLongElements / tile_cols, kTileRows) : kTileRows);
    span = row_scope || (long_rows && a.num_tiles >= kManyTiles) ? padded : long_rows ? kSpan : kStripCols;
  }

  void run(int threads) {
    if (Facts::kGlobalScale && !row_scope) {
      auto* amax = static_cast<uint32_t*>(workspace(WorkspaceSlot::kA, 2 * (a.num_segments + 1) * sizeof(uint32_t)));
      memset(amax, 0, 2 * a.num_segments * sizeof(uint32_t));
      uint32_t *row_amax = amax, *column_amax = a.hadamard ? amax + a.num_segments : amax;
      for_each_task(threads, [&](const RowTile& rows, int64_t begin, int64_t end) {
        scope_amax(rows, begin, end, row_amax, column_amax);
      });
      for (int64_t i = 0; i < a.num_segments; ++i) {
        if (a.row) a.row.global_scale[i] = global_scale_of(row_amax[i], a.four_six);
        if (a.column) a.column.global_scale[i] = global_scale_of(column_amax[i], a.four_six);
      }
    }
    for_each_task(threads, [&](const RowTile& rows, int64_t begin, int64_t end) { quantize_task(rows, begin, end); });
  }

 private:
  using Facts = FormatFacts<kFormat>;

  // fn(tile of rows, columns begin to end of each part), in parallel.
  template <typename Fn>
  void for_each_task(int threads, Fn fn) const {
    const int64_t spans = row_scope ? 1 : ceil_div(part_cols, span);
    const int64_t run = a.column ? tiles_of_task(a.num_tiles, spans, threads) : 1, runs = ceil_div(a.num_tiles, run);
    parallel(threads, runs * spans, [&](int64_t task, int) {
      const int64_t first = task / spans * run, begin = task % spans * span;
      for (int64_t i = first; i < min64(first + run, a.num_tiles); ++i)
        fn(a.tiles[i], begin, min64(begin + span, part_cols));
#if defined(MXMOE_ISA_AVX512)
      if (stream) _mm_sfence();
#endif
    });
  }

  // fn(strip) for the rows of a tile, columns begin to end of each part: all at once from memory, 32 x kStripCols from
  // a source.
  template <typename Fn>
  void for_each_strip(const RowTile& rows, int64_t begin, int64_t end, Fn fn) const {
    const int64_t last = a.column ? rows.padded_rows : rows.rows;
    const int64_t height = a.column || a.source ? kTileRows : last, width = a.source ? kStripCols : end - begin;
    alignas(64) char made[kStripBytes];
    for (int64_t c = begin; c < end || c == 0; c += width + !width)  // rows without columns have a scale as well
      for (int64_t r = 0; r < last; r += height) {
        Strip s{nullptr, 0, 1, r, min64(last - r, height), 0, c, min64(end - c, width), 0};
        s.valid_rows = rows.rows > r ? min64(rows.rows - r, height) : 0;
        if (!a.source) {
          s.data = a.x.ptr<char>() +
                   element_bytes * (rows.batch * a.x.strides[0] + (rows.row + r) * a.x.strides[1] + c * a.x.strides[2]);
          s.row_stride = a.x.strides[1], s.col_stride = a.x.strides[2];
          fn(s);
          continue;
        }
        if (s.valid_rows) a.source.fill(a.source.context, rows.row + r, s.valid_rows, c, s.cols, made);
        s.row_stride = s.cols;
        for (int part = 0; part < a.source.parts; ++part) {
          s.part = part;
          s.data = made + part * s.valid_rows * s.cols * element_bytes;
          s.col = part * part_cols + c;
          fn(s);
        }
      }
  }

  // fn(row within the tile of rows, column of the array) for the tiles of a strip from its column `first` on, loaded.
  template <typename Fn>
  void for_each_tile(Tile& t, const Strip& s, int64_t first, Fn fn) const {
    for (int64_t c = first; c < s.cols; c += tile_cols)
      for (int64_t r = 0; r < s.rows; r += tile_rows) {
        const int64_t left = s.valid_rows - r;
        t.valid_rows = static_cast<int>(left < 0 ? 0 : min64(left, tile_rows));
        t.valid_cols = static_cast<int>(min64(s.cols - c, tile_cols));
        t.rows = long_rows ? t.valid_rows : kTileRows;
        t.cols = static_cast<int>(round_up(t.valid_cols, 32));
        load_tile(t, a.x.dtype, s.data + element_bytes * (r * s.row_stride + c * s.col_stride), s.row_stride,
                  s.col_stride);
        fn(s.row + r, s.col + c);
      }
  }

  template <bool kColumn>
  const float* contracted(Tile& t) const {
    if (!a.hadamard) return t.values;
    rotate<kColumn>(t);
    return t.rotated;
  }

  void scope_amax(const RowTile& rows, int64_t begin, int64_t end, uint32_t* row_amax, uint32_t* column_amax) const {
    if (rows.past_the_end || rows.rows == 0) return;
    Tile t;
    uint32_t row_most = 0, column_most = 0;
    for_each_strip(rows, begin, end, [&](const Strip& strip) {
      for_each_tile(t, strip, 0, [&](int64_t, int64_t) {
        auto most = [&](const float* x) { return amax_bits(x, t.rows * t.cols); };
        if (a.row || !a.hadamard) row_most = larger(row_most, most(contracted<false>(t)));
        if (a.column && a.hadamard) column_most = larger(column_most, most(contracted<true>(t)));
      });
    });
    const int64_t segment = a.scope == Scope::kTensor ? 0 : rows.group;
    atomic_max(row_amax + segment, row_most);
    if (a.hadamard) atomic_max(column_amax + segment, column_most);
  }

  void quantize_task(const RowTile& rows, int64_t begin, int64_t end) const {
    if (rows.past_the_end) {
      for (int64_t part = 0; a.row && part < a.source.parts; ++part)
        zero_rows(a, rows, part * part_cols + begin, end - begin);
      return;
    }
    const int64_t segment = a.scope == Scope::kTensor ? 0 : rows.group;
    Tile t;
    ColumnScales staged;
    for_each_strip(rows, begin, end, [&](const Strip& strip) {
      if (row_scope) {
        for (int64_t r = 0; r < strip.rows; r += tile_rows)
          quantize_rows_in_row_scope(t, rows, rows_of(strip, r, tile_rows));
        return;
      }
      for_each_tile(t, strip, quantize_bf16(rows, strip, staged), [&](int64_t r, int64_t c) {
        if (a.row) row_copy(t, rows, r, c, [&](int) { return a.row.global_scale[segment]; });
        if (a.column) column_copy(t, rows, r, c, segment);
      });
    });
  }

  Strip rows_of(Strip s, int64_t first, int64_t count) const {
    s.data += element_bytes * first * s.row_stride;
    s.row += first;
    s.rows = min64(count, s.rows - first), s.valid_rows = min64(count, s.valid_rows - first);
    return s;
  }

  // The columns of a strip that make whole blocks of 32, where 16-bit integers do; returns their number.
  int64_t quantize_bf16([[maybe_unused]] const RowTile& rows, [[maybe_unused]] const Strip& s,
                        [[maybe_unused]] ColumnScales& staged) const {
#if defined(MXMOE_ISA_AVX512)
    if constexpr (Facts::Element::kBits == 4) {
      if (!in_bf16 || a.column || a.four_six) return 0;
      const int64_t blocks = s.cols / 32;
      for (int64_t r = 0; r < s.valid_rows; ++r) {
        const int64_t line = rows.batch * num_rows + rows.row + s.row + r;
        const auto* x = reinterpret_cast<const uint16_t*>(s.data) + r * s.row_stride;
        uint8_t* values = a.row.values + line * ceil_div(num_cols, 2) + s.col / 2;
        uint8_t* scales = a.row.scales + line * ceil_div(num_cols, Facts::kBlock) + s.col / Facts::kBlock;
        if constexpr (!Facts::kGlobalScale) {
          quantize_mxfp4_row(x, a.source ? 0 : kAhead, blocks, a.floor, stream, values, scales);
        } else {
          const float global = a.row.global_scale[a.scope == Scope::kRow     ? line
                                                  : a.scope == Scope::kGroup ? rows.group
                                                                             : 0];
          if (!(global >= kSmallestGlobal)) return 0;  // nor NaN
          quantize_nvfp4_row(x, s.row_stride, blocks * 32, global, stream, values, scales);
        }
      }
      return blocks * 32;
    }
    if constexpr (Facts::Element::kBits == 8) {
      if (!in_bf16) return 0;
      using E = typename Facts::Element;
      const int cols = static_cast<int>(s.cols / 32 * 32);
      const auto* x = reinterpret_cast<const uint16_t*>(s.data);
      const int64_t row_ahead = a.source ? 0 : a.column ? kRowsAhead * s.row_stride : kAhead;
      const int valid = static_cast<int>(s.valid_rows);
      alignas(64) uint16_t amaxes[kStripCols];
      if (a.column) memset(amaxes, 0, sizeof(amaxes));
      if (a.column && !a.row) amax_bf16_columns(x, s.row_stride, row_ahead, valid, cols, amaxes);
      for (int64_t r = 0; a.row && r < valid; ++r) {
        const int64_t line = rows.batch * num_rows + rows.row + s.row + r;
        quantize_bf16_row<E>(x + r * s.row_stride, row_ahead, cols / 32, a.floor, stream,
                             a.row.values + line * num_cols + s.col,
                             a.row.scales + line * ceil_div(num_cols, 32) + s.col / 32, a.column ? amaxes : nullptr);
      }
      if (a.column) {
        const int64_t row = rows.padded_row + s.row, line_blocks = ceil_div(a.padded_rows, 32);
        quantize_bf16_columns<E>(x, s.row_stride, amaxes, valid, static_cast<int>(s.rows), cols, a.floor, stream,
                                 a.column.values + (rows.batch * a.padded_rows + row) * num_cols + s.col, num_cols,
                                 staged.bytes[s.part][s.row / 32]);
        if (s.row + s.rows == rows.padded_rows) {
          uint8_t* to = a.column.scales + (rows.batch * num_cols + s.col) * line_blocks + rows.padded_row / 32;
          scatter_scales(staged.bytes[s.part], static_cast<int>(ceil_div(rows.padded_rows, 32)), cols, to, line_blocks);
        }
      }
      return cols;
    }
#endif
    return 0;
  }

  // The rows are read twice, the second time from cache.
  void quantize_rows_in_row_scope(Tile& t, const RowTile& rows, const Strip& s) const {
    if (quantize_bf16_in_row_scope(rows, s)) return;
    uint32_t amax[kTileRows] = {};
    for_each_tile(t, s, 0, [&](int64_t, int64_t) {
      const float* x = contracted<false>(t);
      for (int i = 0; i < t.valid_rows; ++i) amax[i] = larger(amax[i], amax_bits(x + i * t.cols, t.cols));
    });
    float* global = a.row.global_scale + rows.batch * num_rows + rows.row + s.row;
    for (int64_t i = 0; i < s.rows; ++i) global[i] = global_scale_of(amax[i], a.four_six);
    for_each_tile(t, s, 0, [&](int64_t r, int64_t c) {
      row_copy(t, rows, r, c, [&](int i) { return i < t.valid_rows ? global[i] : 1.0f; });
    });
  }

  // Whether 16-bit integers did it.
  bool quantize_bf16_in_row_scope([[maybe_unused]] const RowTile& rows, [[maybe_unused]] const Strip& s) const {
#if defined(MXMOE_ISA_AVX512)
    if (!in_bf16 || a.four_six || num_cols % 32) return false;
    bool done = true;
    ColumnScales none;
    for (int64_t r = 0; r < s.rows; ++r) {
      const Strip row = rows_of(s, r, 1);
      const uint32_t amax = amax_bf16_row(reinterpret_cast<const uint16_t*>(row.data), num_cols);
      a.row.global_scale[rows.batch * num_rows + rows.row + row.row] = global_scale_of(amax << 16, false);
      done &= quantize_bf16(rows, row, none) == num_cols;
    }
    return done;
#else
    return false;
#endif
  }

  template <typename GlobalOf>
  void row_copy(Tile& t, const RowTile& rows, int64_t r, int64_t c, GlobalOf global_of) const {
    if constexpr (Facts::kGlobalScale) {
      const int blocks = t.cols / Facts::kBlock;
      for (int i = 0; i < t.rows; ++i) {
        const float global = global_of(i);
        for (int k = 0; k < blocks; ++k) t.blocks.global[i * blocks + k] = global;
      }
    }
    quantize_tile<false>(t, rows, r, c);
    emit_row<kFormat>(t, {rows.batch, num_rows, num_cols, rows.row + r, c}, a.row);
  }

  void column_copy(Tile& t, const RowTile& rows, int64_t r, int64_t c, int64_t segment) const {
    if constexpr (Facts::kGlobalScale) {
      for (int i = 0; i < t.rows * t.cols / Facts::kBlock; ++i) t.blocks.global[i] = a.column.global_scale[segment];
    }
    quantize_tile<true>(t, rows, r, c);
    memset(t.codes + t.valid_rows * t.cols, 0, (t.rows - t.valid_rows) * t.cols);  // padding, whatever its block holds
    const int rows_to_write = static_cast<int>(min64(rows.padded_rows - r, kTileRows));
    emit_column<kFormat>(t, {rows.batch, a.padded_rows, num_cols, rows.padded_row + r, c}, rows_to_write, a.column);
  }

  template <bool kColumn>
  void quantize_tile(Tile& t, const RowTile& rows, int64_t r, int64_t c) const {
    constexpr int kBlock = Facts::kBlock;
    const int count = t.rows * t.cols / kBlock;
    const float* x = contracted<kColumn>(t);
    block_amax<kColumn>(t, x, kBlock);
    if (a.block_2d) share_amax<kColumn>(t, kBlock);
    if constexpr (Facts::kGlobalScale) {
      nvfp4_scales(t.blocks, count, 6.0f, t.blocks.scale, t.blocks.factor);
      if (a.four_six) choose_four_or_six<kColumn>(t, x, a.block_2d);
    } else {
      mx_scales<typename Facts::Element>(t.blocks, count, a.floor);
    }
    if (a.stochastic) {
      uint32_t words[kLongElements];  // of one row
      const uint64_t index = static_cast<uint64_t>((rows.logical_row + r) * num_cols + c);
      const uint32_t copy =
          kColumn && !a.block_2d ? kPhiloxColumnCopy : kPhiloxRowCopy;  // 2-D: both copies hold the same
      encode_tile<kFormat, kColumn, true>(t, x, {words, a.seed, index, static_cast<uint64_t>(num_cols), copy});
    } else {
      encode_tile<kFormat, kColumn, false>(t, x, {});
    }
    fill_special_blocks<kFormat, kColumn>(t);
  }

  const QuantizeArgs& a;
  const int64_t num_rows, num_cols, part_cols, element_bytes;
  const bool long_rows;  // tiles of few, long rows instead of 32 x 256
  const bool row_scope, in_bf16, stream;
  int tile_cols, tile_rows;
  int64_t span;
};

}  // namespace

void quantize(const QuantizeArgs& args, int threads) {
  switch (args.format) {
    case Format::kMxfp8:
      return Quantizer<Format::kMxfp8>(args).run(threads);
    case Format::kMxfp8E5m2:
      return Quantizer<Format::kMxfp8E5m2>(args).run(threads);
    case Format::kMxfp4:
      return Quantizer<Format::kMxfp4>(args).run(threads);
    case Format::kNvfp4:
      return Quantizer<Format::kNvfp4>(args).run(threads);
  }
}

}  // namespace mxmoe::host::MXMOE_ISA
