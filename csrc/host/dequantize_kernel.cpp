// dequantize: tile by tile, fetch codes and scales -> decode to FP32 -> round to the output's dtype.
#include "host/decode.h"
#include "host/dequantize.h"
#include "host/threads.h"
#include "host/tile.h"
#include "layout.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

constexpr int64_t kSpan = 2048;  // columns of a task

int64_t min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}

template <DType D>
void store_tile(const Tile& t, stored<D>* out, int64_t row_stride, int64_t col_stride) {
  alignas(64) stored<D> line[kLongElements];
  for (int r = 0; r < t.valid_rows; ++r) {
    for (int c = 0; c < t.cols; c += kLanes) store_elements<D>(line + c, load<f32>(t.values + r * t.cols + c));
    stored<D>* to = out + r * row_stride;
    if (col_stride == 1) {
      memcpy(to, line, t.valid_cols * sizeof(line[0]));
    } else {
      for (int c = 0; c < t.valid_cols; ++c) to[c * col_stride] = line[c];
    }
  }
}

void store_tile(const Tile& t, const Tensor& out, int64_t batch, int64_t row, int64_t col) {
  with_dtype(out.dtype, [&]<DType D>() {
    auto* corner = out.ptr<stored<D>>() + batch * out.strides[0] + row * out.strides[1] + col * out.strides[2];
    store_tile<D>(t, corner, out.strides[1], out.strides[2]);
  });
}

template <Format kFormat, bool kColumn>
class Dequantizer {
 public:
  explicit Dequantizer(const DequantizeArgs& args) : a(args), num_rows(a.out.sizes[1]), num_cols(a.out.sizes[2]) {}

  void run(int threads) {
    const int64_t spans = ceil_div(num_cols, kSpan);
    parallel(threads, a.num_tiles * spans, [&](int64_t task, int) {
      const RowTile& rows = a.tiles[task / spans];
      const int64_t begin = task % spans * kSpan, end = min64(begin + kSpan, num_cols);
      const int height = kColumn ? kTileRows : 1, width = kColumn ? kTileCols : kLongElements;
      Tile t;
      for (int64_t c = begin; c < end; c += width)
        for (int64_t r = 0; r < rows.rows; r += height) {
          t.valid_rows = static_cast<int>(min64(rows.rows - r, height));
          t.valid_cols = static_cast<int>(min64(end - c, width));
          t.rows = height, t.cols = static_cast<int>(round_up(t.valid_cols, 32));
          if (rows.past_the_end) {
            memset(t.values, 0, t.rows * t.cols * sizeof(float));
          } else {
            fetch(t, rows, r, c);
            decode(t, global_scale(rows, r));
          }
          store_tile(t, a.out, rows.batch, rows.row + r, c);
        }
    });
  }

 private:
  using Facts = FormatFacts<kFormat>;
  static constexpr int kBlock = Facts::kBlock;
  static constexpr int kPerByte = 8 / Facts::Element::kBits;

  float global_scale(const RowTile& rows, int64_t r) const {
    if (!Facts::kGlobalScale) return 1.0f;
    if (a.scope == Scope::kRow)
      return a.global_scale[rows.batch * num_rows + rows.row + r];  // a row copy: one row a tile
    return a.global_scale[a.scope == Scope::kTensor ? 0 : rows.group];
  }

  void fetch(Tile& t, const RowTile& rows, int64_t r, int64_t c) const {
    if constexpr (!kColumn) {
      const int64_t line = rows.batch * num_rows + rows.row + r;
      const uint8_t* values = a.values + line * ceil_div(num_cols, kPerByte) + c / kPerByte;
      const int bytes = static_cast<int>(ceil_div(t.valid_cols, kPerByte));
      if constexpr (kPerByte == 2) {
        unpack_pairs(values, bytes, t.codes);
      } else {
        memcpy(t.codes, values, bytes);
      }
      memcpy(t.blocks.scale, a.scales + line * ceil_div(num_cols, kBlock) + c / kBlock, ceil_div(t.valid_cols, kBlock));
      return;
    }
    const int64_t row = rows.padded_row + r, line_blocks = ceil_div(a.padded_rows, kBlock);
    const int64_t first_line = rows.batch * num_cols + c;
    if constexpr (kPerByte == 2) {
      const int64_t line_bytes = ceil_div(a.padded_rows, 2);
      for (int col = 0; col < t.valid_cols; ++col) {
        const uint8_t* values = a.values + (first_line + col) * line_bytes + row / 2;
        for (int i = 0; i < (t.valid_rows + 1) / 2; ++i) {
          t.codes[2 * i * t.cols + col] = values[i] & 15;
          t.codes[(2 * i + 1) * t.cols + col] = values[i] >> 4;
        }
      }
    } else {
      const uint8_t* values = a.values + (rows.batch * a.padded_rows + row) * num_cols + c;
      for (int i = 0; i < t.valid_rows; ++i) memcpy(t.codes + i * t.cols, values + i * num_cols, t.valid_cols);
    }
    for (int k = 0; k * kBlock < t.valid_rows; ++k)
      for (int col = 0; col < t.valid_cols; ++col)
        t.blocks.scale[k * t.cols + col] = a.scales[(first_line + col) * line_blocks + row / kBlock + k];
  }

  void decode(Tile& t, float global) const {
    const int count = t.rows * t.cols / kBlock;
    for (int i = 0; i < count; i += kLanes)
      store(t.blocks.factor + i, decode_scales<kFormat>(widen(load<u8q>(t.blocks.scale + i))));
    for (int r = 0; r < t.valid_rows; ++r)
      for (int c = 0; c < t.cols; c += kLanes) {
        const int at = r * t.cols + c, block = t.block_index<kColumn>(r, c, kBlock);
        f32 scale = kColumn ? load<f32>(t.blocks.factor + block) : splat(t.blocks.factor[block]);
        f32 x = decode_elements<typename Facts::Element>(widen(load<u8q>(t.codes + at))) * scale;
        store(t.values + at, Facts::kGlobalScale ? x * splat(global) : x);
      }
  }

  const DequantizeArgs& a;
  const int64_t num_rows, num_cols;
};

template <Format kFormat>
void run(const DequantizeArgs& args, int threads) {
  if (args.column) {
    Dequantizer<kFormat, true>(args).run(threads);
  } else {
    Dequantizer<kFormat, false>(args).run(threads);
  }
}

}  // namespace

void dequantize(const DequantizeArgs& args, int threads) {
  switch (args.format) {
    case Format::kMxfp8:
      return run<Format::kMxfp8>(args, threads);
    case Format::kMxfp8E5m2:
      return run<Format::kMxfp8E5m2>(args, threads);
    case Format::kMxfp4:
      return run<Format::kMxfp4>(args, threads);
    case Format::kNvfp4:
      return run<Format::kNvfp4>(args, threads);
  }
}

}  // namespace mxmoe::host::MXMOE_ISA
