// quantize: the array is cut into tasks (a tile of rows x a span of columns), a task into tiles that
// are read once and give both copies. A scope larger than a row takes a pass of its own for its amax.
#include "host/emit.h"
#include "host/quantize.h"
#include "host/quantize_bf16.h"
#include "host/threads.h"
#include "host/tile.h"
#include "layout.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

constexpr int64_t kSpan = 2048;                      // columns of a task
constexpr int64_t kStreamBytes = int64_t{16} << 20;  // from this output size on, stores bypass the caches
constexpr int64_t kManyTiles = 64;  // enough tasks without cutting rows: 2.5 times faster on rows of 7168

int64_t min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
uint32_t larger(uint32_t a, uint32_t b) {
  return a > b ? a : b;
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

template <Format kFormat>
class Quantizer {
 public:
  explicit Quantizer(const QuantizeArgs& args)
      : a(args),
        num_rows(a.x.sizes[1]),
        num_cols(a.x.sizes[2]),
        long_rows(!a.column && !a.block_2d && a.x.strides[2] == 1),
        row_scope(Facts::kGlobalScale && a.scope == Scope::kRow),
        in_bf16(a.x.dtype == DType::kBF16 && a.x.strides[2] == 1 && !a.stochastic && !a.hadamard && !a.block_2d),
        stream(a.x.sizes[0] * num_rows * num_cols >= kStreamBytes) {
    const int64_t padded = num_cols > 0 ? round_up(num_cols, 32) : 32;
    tile_cols = static_cast<int>(long_rows ? min64(padded, kLongElements) : kTileCols);
    tile_rows = static_cast<int>(long_rows ? min64(kLongElements / tile_cols, kTileRows) : kTileRows);
    span = row_scope ? padded : kSpan;  // a whole row where it has one scale
    if (long_rows && a.num_tiles >= kManyTiles) span = padded;
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

  // fn(tile of rows, columns begin to end), in parallel.
  template <typename Fn>
  void for_each_task(int threads, Fn fn) const {
    const int64_t spans = row_scope ? 1 : ceil_div(num_cols, span);
    parallel(threads, a.num_tiles * spans, [&](int64_t task, int) {
      const int64_t begin = task % spans * span;
      fn(a.tiles[task / spans], begin, min64(begin + span, num_cols));
    });
  }

  // fn(row within the tile of rows, column) for every tile of a task, the tile loaded.
  template <typename Fn>
  void for_each_tile(Tile& t, const RowTile& rows, int64_t row_begin, int64_t row_end, int64_t col_begin,
                     int64_t col_end, Fn fn) const {
    auto visit = [&](int64_t r, int64_t c) {
      const int64_t left = rows.rows - r;
      t.valid_rows = static_cast<int>(left < 0 ? 0 : min64(left, tile_rows));
      t.valid_cols = static_cast<int>(min64(col_end - c, tile_cols));
      t.rows = long_rows ? t.valid_rows : kTileRows;
      t.cols = static_cast<int>(round_up(t.valid_cols, 32));
      load_tile(t, a.x, rows.batch, rows.row + r, c);
      fn(r, c);
    };
    if (long_rows) {
      for (int64_t r = row_begin; r < row_end; r += tile_rows)
        for (int64_t c = col_begin; c < col_end; c += tile_cols) visit(r, c);
    } else {  // a column copy's lines are written down the rows: what is written stays in cache
      for (int64_t c = col_begin; c < col_end; c += tile_cols)
        for (int64_t r = row_begin; r < row_end; r += tile_rows) visit(r, c);
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
    for_each_tile(t, rows, 0, rows.rows, begin, end, [&](int64_t, int64_t) {
      auto most = [&](const float* x) { return amax_bits(x, t.rows * t.cols); };
      if (a.row || !a.hadamard) row_most = larger(row_most, most(contracted<false>(t)));
      if (a.column && a.hadamard) column_most = larger(column_most, most(contracted<true>(t)));
    });
    const int64_t segment = a.scope == Scope::kTensor ? 0 : rows.group;
    atomic_max(row_amax + segment, row_most);
    if (a.hadamard) atomic_max(column_amax + segment, column_most);
  }

  void quantize_task(const RowTile& rows, int64_t begin, int64_t end) const {
    if (rows.past_the_end) {
      if (a.row) zero_rows(a, rows, begin, end - begin);
      return;
    }
#if defined(MXMOE_ISA_AVX512)
    if constexpr (Facts::Element::kBits == 8) {
      if (in_bf16) begin += bf16_blocks(rows, begin, end);
    }
#endif
    Tile t;
    if (row_scope) {
      for (int64_t r = 0; r < rows.rows; r += tile_rows) quantize_rows_in_row_scope(t, rows, r);
      return;
    }
    const int64_t last = a.column ? rows.padded_rows : rows.rows, segment = a.scope == Scope::kTensor ? 0 : rows.group;
    for_each_tile(t, rows, 0, last, begin, end, [&](int64_t r, int64_t c) {
      if (a.row) row_copy(t, rows, r, c, [&](int) { return a.row.global_scale[segment]; });
      if (a.column) column_copy(t, rows, r, c, segment);
    });
  }

#if defined(MXMOE_ISA_AVX512)
  // The columns of a task that make whole blocks of 32; returns their number.
  int64_t bf16_blocks(const RowTile& rows, int64_t col, int64_t end) const {
    const int64_t blocks = (end - col) / 32;
    const int64_t last = a.column ? rows.padded_rows : rows.rows;
    for (int64_t r = 0; r < last; r += 32) {  // both copies of 32 rows while they are in cache
      if (a.column) bf16_columns(rows, r, col, blocks);
      if (a.row) bf16_rows(rows, r, min64(r + 32, rows.rows), col, blocks);
    }
    if (stream) _mm_sfence();
    return blocks * 32;
  }

  const uint16_t* bf16_at(const RowTile& rows, int64_t r, int64_t col) const {
    return a.x.ptr<uint16_t>() + rows.batch * a.x.strides[0] + (rows.row + r) * a.x.strides[1] + col;
  }

  void bf16_rows(const RowTile& rows, int64_t first, int64_t last, int64_t col, int64_t blocks) const {
    for (int64_t r = first; r < last; ++r) {
      const int64_t line = rows.batch * num_rows + rows.row + r;
      uint8_t* scales = a.row.scales + line * ceil_div(num_cols, 32) + col / 32;
      quantize_bf16_row<typename Facts::Element>(bf16_at(rows, r, col), blocks, a.floor, stream,
                                                 a.row.values + line * num_cols + col, scales);
    }
  }

  // Rows r to r + 32 of the tile, which are one block of each column's line.
  void bf16_columns(const RowTile& rows, int64_t r, int64_t col, int64_t blocks) const {
    const int valid = static_cast<int>(min64(rows.rows > r ? rows.rows - r : 0, 32));
    const int to_write = static_cast<int>(min64(rows.padded_rows - r, 32));
    const int64_t row = rows.padded_row + r, line_blocks = ceil_div(a.padded_rows, 32);
    for (int64_t c = col; c < col + blocks * 32; c += 32)
      quantize_bf16_columns<typename Facts::Element>(
          bf16_at(rows, r, c), a.x.strides[1], valid, to_write, a.floor,
          a.column.values + (rows.batch * a.padded_rows + row) * num_cols + c, num_cols,
          a.column.scales + (rows.batch * num_cols + c) * line_blocks + row / 32, line_blocks);
  }
#endif

  // The rows are read twice, the second time from cache.
  void quantize_rows_in_row_scope(Tile& t, const RowTile& rows, int64_t first) const {
    const int64_t end = min64(first + tile_rows, rows.rows);
    uint32_t amax[kTileRows] = {};
    for_each_tile(t, rows, first, end, 0, num_cols, [&](int64_t, int64_t) {
      const float* x = contracted<false>(t);
      for (int i = 0; i < t.valid_rows; ++i) amax[i] = larger(amax[i], amax_bits(x + i * t.cols, t.cols));
    });
    float* global = a.row.global_scale + rows.batch * num_rows + rows.row + first;
    for (int64_t i = 0; i < end - first; ++i) global[i] = global_scale_of(amax[i], a.four_six);
    for_each_tile(t, rows, first, end, 0, num_cols, [&](int64_t r, int64_t c) {
      row_copy(t, rows, r, c, [&](int i) { return i < t.valid_rows ? global[i] : 1.0f; });
    });
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
  const int64_t num_rows, num_cols;
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
