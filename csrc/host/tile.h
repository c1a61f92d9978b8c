// A tile of an array in FP32, small enough for the nearest caches, and the steps of quantization over it:
//   load -> [rotate] -> block amax -> block scales -> codes (one per byte) -> emit.
// Blocks run along the rows of the tile (a row copy) or down its columns (kColumn, a column copy): per-block arrays are
// indexed [row][block] or [block][column], so that every step but the first reduction runs over whole vectors either
// way.
#pragma once
#include "formats.h"
#include "host/elements.h"
#include "tensor.h"

namespace mxmoe::host::MXMOE_ISA {

constexpr int kTileRows = 32,
              kTileCols = 256;  // wide, because walking down 32 rows in narrow steps defeats prefetching
constexpr int kTileElements = kTileRows * kTileCols;
constexpr int kLongElements = 2048;  // of a tile of few, long rows: all its arrays fit in L1
constexpr int kMaxBlocks = kTileElements / 16;

struct Blocks {
  alignas(64) uint32_t amax[kMaxBlocks];  // bits
  alignas(64) float global[kMaxBlocks];   // s_dec of the block (NVFP4)
  alignas(64) float factor[kMaxBlocks];   // element = round(x * factor), NVFP4: round(x / factor)
  alignas(64) uint8_t scale[kMaxBlocks];
};

struct Tile {
  int rows = 0, cols = 0;              // held: cols a multiple of 32; what lies outside the source is zero
  int valid_rows = 0, valid_cols = 0;  // of the source
  alignas(64) float values[kTileElements];
  alignas(64) float rotated[kTileElements];
  alignas(64) uint8_t codes[kTileElements];
  Blocks blocks;

  template <bool kColumn>
  int block_index(int row, int col, int block) const {
    return kColumn ? row / block * cols + col : (row * cols + col) / block;
  }
};

// The tile from memory; what lies past the source becomes zero.
template <DType D>
static void load_tile(Tile& t, const stored<D>* x, int64_t row_stride, int64_t col_stride) {
  const int vector_cols = col_stride == 1 ? t.valid_cols / kLanes * kLanes : 0;
  for (int r = 0; r < t.rows; ++r) {
    float* out = t.values + r * t.cols;
    const bool inside = r < t.valid_rows;
    for (int c = 0; inside && c < vector_cols; c += kLanes) store(out + c, load_elements<D>(x + r * row_stride + c));
    for (int c = inside ? vector_cols : 0; c < t.cols; ++c) out[c] = 0.0f;
  }
  if (vector_cols == t.valid_cols) return;
  auto copy = [&](int r, int c) {
    stored<D> element = x[r * row_stride + c * col_stride];
    if constexpr (D == DType::kF32) t.values[r * t.cols + c] = element;
    if constexpr (D == DType::kBF16) t.values[r * t.cols + c] = f32_of_bf16(element);
    if constexpr (D == DType::kF16) t.values[r * t.cols + c] = f32_of_f16(element);
  };
  if (row_stride < col_stride) {  // a transposed view: walk along its memory
    for (int c = vector_cols; c < t.valid_cols; ++c)
      for (int r = 0; r < t.valid_rows; ++r) copy(r, c);
  } else {
    for (int r = 0; r < t.valid_rows; ++r)
      for (int c = vector_cols; c < t.valid_cols; ++c) copy(r, c);
  }
}

static inline void load_tile(Tile& t, DType dtype, const void* corner, int64_t row_stride, int64_t col_stride) {
  with_dtype(dtype, [&]<DType D>() { load_tile<D>(t, static_cast<const stored<D>*>(corner), row_stride, col_stride); });
}

// values -> rotated: the signed 16-point Hadamard transform along the contraction.
template <bool kColumn>
static void rotate(Tile& t) {
  const int step = kColumn ? t.cols : 1, lanes = kColumn ? t.cols : 1;  // between elements; transforms side by side
  for (int first = 0; first < t.rows * t.cols; first += kHadamardSize * lanes) {
    float* v = t.rotated + first;
    for (int i = 0; i < kHadamardSize; ++i)
      for (int l = 0; l < lanes; ++l) {
        float x = t.values[first + i * step + l];
        v[i * step + l] = kHadamardSigns >> i & 1 ? -x : x;
      }
    for (int stride = 1; stride < kHadamardSize; stride *= 2)
      for (int i = 0; i < kHadamardSize; ++i) {
        if (i & stride) continue;
        float *a = v + i * step, *b = v + (i + stride) * step;
        for (int l = 0; l < lanes; ++l) {
          float sum = a[l] + b[l], difference = a[l] - b[l];
          a[l] = sum, b[l] = difference;
        }
      }
    for (int i = 0; i < kHadamardSize * lanes; ++i) v[i] *= kHadamardScale;
  }
}

MXMOE_INLINE u32 magnitude(f32 x) {
  return bits(x) & 0x7fffffffu;
}

// Bits of max |x| over elements [begin, begin + count), a multiple of kLanes; a NaN wins over everything.
MXMOE_INLINE uint32_t amax_bits(const float* begin, int count) {
  u32 m{};
  for (int i = 0; i < count; i += kLanes) m = max_u32(m, magnitude(load<f32>(begin + i)));
  return reduce_max(m);
}

template <bool kColumn>
static void block_amax(Tile& t, const float* x, int block) {
  if constexpr (!kColumn) {
    for (int i = 0; i < t.rows * t.cols / block; ++i) t.blocks.amax[i] = amax_bits(x + i * block, block);
  } else {
    for (int first = 0; first < t.rows; first += block)
      for (int c = 0; c < t.cols; c += kLanes) {
        u32 m{};
        for (int r = first; r < first + block; ++r) m = max_u32(m, magnitude(load<f32>(x + r * t.cols + c)));
        store(t.blocks.amax + first / block * t.cols + c, m);
      }
  }
}

// The lines of a square of block x block elements: fn(index of its first block, step to the next line's block, its
// corner).
template <bool kColumn, typename Fn>
MXMOE_INLINE void for_each_square(const Tile& t, int block, Fn fn) {
  for (int r = 0; r < t.rows; r += block)
    for (int c = 0; c < t.cols; c += block)
      fn(t.block_index<kColumn>(r, c, block), kColumn ? 1 : t.cols / block, r * t.cols + c);
}

template <bool kColumn>
static void share_amax(Tile& t, int block) {
  for_each_square<kColumn>(t, block, [&](int first, int step, int) {
    uint32_t* amax = t.blocks.amax + first;
    uint32_t most = 0;
    for (int i = 0; i < block; ++i) most = amax[i * step] > most ? amax[i * step] : most;
    for (int i = 0; i < block; ++i) amax[i * step] = most;
  });
}

template <typename E>
static void mx_scales(Blocks& b, int count, bool floor) {
  for (int i = 0; i < count; i += kLanes) {
    u32 amax = load<u32>(b.amax + i);
    u32 scale = floor ? scale_floor<E, u32>(amax) : scale_rceil<E, f32, u32>(amax);
    store(b.scale + i, narrow8(scale));
    store(b.factor + i, from_bits(e8m0_inverse_bits<u32>(scale)));
  }
}

// E4M3(amax / divisor / s_dec) and the element divisor float(scale) * s_dec.
static inline void nvfp4_scales(const Blocks& b, int count, float divisor, uint8_t* scale, float* factor) {
  for (int i = 0; i < count; i += kLanes) {
    f32 global = load<f32>(b.global + i);
    f32 ratio = from_bits(load<u32>(b.amax + i)) / splat(divisor) / global;
    u32 code = encode_nearest<E4M3, f32, u32>(bits(ratio));
    code = magnitude(global) > kInfBits ? splat_u32(kNvfp4Poison) : code;
    store(scale + i, narrow8(code));
    store(factor + i, from_bits(decode_magnitude<E4M3, f32, u32>(code)) * global);
  }
}

MXMOE_INLINE float tree_sum(float* v) {  // of 16
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}

// Squared error of 16 elements `step` apart, dequantized with a block scale.
static inline float squared_error(const float* x, int step, float scale, float factor, float global) {
  float errors[16];
  for (int i = 0; i < 16; ++i) {
    float value = x[i * step], decoded = 0.0f;
    if (scale != 0.0f) {
      uint32_t code = encode_nearest<E2M1>(bits_of(value / factor) & 0x7fffffffu);
      uint32_t sign = bits_of(value) & 0x80000000u;
      decoded = f32_of(decode_magnitude<E2M1>(code) | sign) * scale * global;
    }
    float error = decoded - value;
    errors[i] = error * error;
  }
  return tree_sum(errors);
}

// four_six: keeps the block scale from amax / 6, or takes the one from amax / 4 where its squared error is lower.
// Squares sum along the rows of the tile first, for both copies.
template <bool kColumn>
static void choose_four_or_six(Tile& t, const float* x, bool squares) {
  constexpr int kBlock = 16;
  const int count = t.rows * t.cols / kBlock;
  Blocks& b = t.blocks;
  alignas(64) uint8_t scale4[kMaxBlocks];
  alignas(64) float factor4[kMaxBlocks];
  nvfp4_scales(b, count, 4.0f, scale4, factor4);
  auto error = [&](int i, const float* from, int step, const uint8_t* scale, const float* factor) {
    return squared_error(from, step, f32_of(decode_magnitude<E4M3>(uint32_t{scale[i]})), factor[i], b.global[i]);
  };
  auto take_four = [&](int i) { b.scale[i] = scale4[i], b.factor[i] = factor4[i]; };
  if (squares) {
    for_each_square<kColumn>(t, kBlock, [&](int first, int step, int corner) {
      float six[kBlock], four[kBlock];
      for (int r = 0; r < kBlock; ++r) {
        six[r] = error(first, x + corner + r * t.cols, 1, b.scale, b.factor);
        four[r] = error(first, x + corner + r * t.cols, 1, scale4, factor4);
      }
      if (tree_sum(four) < tree_sum(six))
        for (int i = 0; i < kBlock; ++i) take_four(first + i * step);
    });
    return;
  }
  for (int i = 0; i < count; ++i) {
    const float* from = kColumn ? x + i / t.cols * kBlock * t.cols + i % t.cols : x + i * kBlock;
    const int step = kColumn ? t.cols : 1;
    if (error(i, from, step, scale4, factor4) < error(i, from, step, b.scale, b.factor)) take_four(i);
  }
}

// Random words of stochastic rounding for one row of the tile; `index` is the logical index of its first element.
static inline void random_words(uint32_t* words, int count, uint64_t seed, uint64_t index, uint32_t copy) {
  Philox block = philox(seed, index >> 2, copy);
  for (int i = 0; i < count; ++i, ++index) {
    if (i && !(index & 3)) block = philox(seed, index >> 2, copy);
    words[i] = block.word[index & 3];
  }
}

struct Stochastic {  // words == nullptr: round to nearest even
  uint32_t* words = nullptr;
  uint64_t seed = 0, index = 0, row_length = 0;
  uint32_t copy = 0;
};

template <Format kFormat, bool kColumn, bool kStochastic>
static void encode_tile(Tile& t, const float* x, const Stochastic& random) {
  using Facts = FormatFacts<kFormat>;
  using E = typename Facts::Element;
  constexpr uint32_t kSign = 1u << (E::kBits - 1);
  for (int r = 0; r < t.rows; ++r) {
    if constexpr (kStochastic)
      random_words(random.words, t.cols, random.seed, random.index + r * random.row_length, random.copy);
    for (int c = 0; c < t.cols; c += kLanes) {
      const int at = r * t.cols + c, block = t.block_index<kColumn>(r, c, Facts::kBlock);
      u32 b = bits(load<f32>(x + at));
      f32 factor = kColumn ? load<f32>(t.blocks.factor + block) : splat(t.blocks.factor[block]);
      f32 value = from_bits(b & 0x7fffffffu);
      u32 scaled = bits(Facts::kGlobalScale ? value / factor : value * factor), code;
      if constexpr (kStochastic) {
        code = encode_stochastic<E, u32>(scaled, load<u32>(random.words + c));
      } else {
        code = encode_nearest<E, f32, u32>(scaled);
      }
      store(t.codes + at, narrow8(code | (b >> (32 - E::kBits) & kSign)));
    }
  }
}

// Blocks whose elements are not x / scale: a NaN or Inf inside (or in the scope), or an NVFP4 scale that rounded to
// zero.
template <Format kFormat, bool kColumn>
static void fill_special_blocks(Tile& t) {
  using Facts = FormatFacts<kFormat>;
  constexpr int kBlock = Facts::kBlock;
  const int count = t.rows * t.cols / kBlock;
  for (int i = 0; i < count; ++i) {
    const uint8_t scale = t.blocks.scale[i];
    if (Facts::kGlobalScale ? scale != 0 && scale != kNvfp4Poison : scale != 255) continue;
    uint8_t* codes = kColumn ? t.codes + i / t.cols * kBlock * t.cols + i % t.cols : t.codes + i * kBlock;
    for (int j = 0; j < kBlock; ++j) codes[kColumn ? j * t.cols : j] = Facts::Element::kPoison;
  }
}

}  // namespace mxmoe::host::MXMOE_ISA
