// What the grouped GEMMs of all architectures share: the output's types, and its stores by pairs.
#pragma once
#include <cstdint>

#include "cuda/kernels/elements.h"
#include "cuda/tile/types.h"

namespace mxmoe::cuda {

using Output = Input;  // the same three types

// body.template operator()<Output>()
template <typename Body>
void with_output(DType dtype, Body&& body) {
  with_input(dtype, body);
}

// Whether 16-byte pieces of rows of `columns`, `stride` elements apart, are aligned.
template <Output kOutput>
MXMOE_KERNEL bool output_aligned(const void* out, int64_t stride, int columns) {
  constexpr int kVector = 16 / bytes_of(kOutput);
  return stride % kVector == 0 && columns % kVector == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
}

// 16 columns of each lane's row, the first `columns` of them there: rounded once, stored.
template <Output kOutput, class M, class F, class I, class P>
MXMOE_KERNEL void store_columns(M& m, uint8_t* out, I offset, const F (&y)[16], int columns, bool aligned, P writes) {
  using U = typename M::template lane<uint32_t>;
  constexpr int kBytes = bytes_of(kOutput), kVector = 16 / kBytes;  // elements of a 16-byte store
  for (int j = 0; j < 16; j += kVector) {
    U word[4];
    for (int i = 0; i < 4; ++i) {
      if constexpr (kOutput == Output::kF32) word[i] = __builtin_bit_cast(U, y[j + i]);
      if constexpr (kOutput == Output::kBF16) word[i] = m.cvt_bf16x2(y[j + 2 * i], y[j + 2 * i + 1]);
      if constexpr (kOutput == Output::kF16) word[i] = m.cvt_f16x2(y[j + 2 * i], y[j + 2 * i + 1]);
    }
    if (aligned) {
      if (j < columns) m.st_global_v4(out, offset + j * kBytes, word[0], word[1], word[2], word[3], writes);
      continue;
    }
    for (int i = 0; i < kVector; ++i) {
      if (j + i >= columns) break;
      if constexpr (kBytes == 4)
        m.template st_global<uint32_t>(out, offset + (j + i) * 4, word[i], writes);
      else
        m.template st_global<uint16_t>(out, offset + (j + i) * 2,
                                       m.template cast<uint16_t>(word[i / 2] >> (16 * (i % 2)) & 0xffffu), writes);
    }
  }
}

// Adds what is there already. Gradients are summed in FP32; the other types go element by element.
template <Output kOutput, class M, class F, class I, class P>
MXMOE_KERNEL void add_columns(M& m, const uint8_t* out, I offset, F (&y)[16], int columns, bool aligned, P exists) {
  constexpr int kBytes = bytes_of(kOutput), kVector = 16 / kBytes;
  for (int j = 0; j < 16; j += kVector) {
    if (j >= columns) break;
    if (kBytes == 4 && aligned) {
      typename M::template registers<uint32_t, 4> words;
      m.ld_global_v4(words, out, offset + j * kBytes, exists);
      for (int i = 0; i < 4; ++i) y[j + i] = y[j + i] + to_float<kOutput, 0>(m, words[i]);
      continue;
    }
    using Element = std::conditional_t<kBytes == 4, uint32_t, uint16_t>;
    for (int i = 0; i < kVector; ++i) {
      if (j + i >= columns) break;
      const auto word = m.template ld_global<Element>(out, offset + (j + i) * kBytes, exists);
      y[j + i] = y[j + i] + to_float<kOutput, 0>(m, m.template cast<uint32_t>(word));
    }
  }
}

// Two neighbouring columns (the first one even) of each lane's row, those before `columns`: rounded once, stored.
// aligned: pairs are.
template <Output kOutput, class M, class F, class I, class P>
MXMOE_KERNEL void store_pair(M& m, uint8_t* out, I offset, const F (&y)[2], I column, int columns, bool aligned,
                             P writes) {
  using U = typename M::template lane<uint32_t>;
  constexpr int kBytes = bytes_of(kOutput);
  U words[2];
  for (int j = 0; j < 2; ++j) {
    if constexpr (kOutput == Output::kF32) words[j] = __builtin_bit_cast(U, y[j]);
    if constexpr (kOutput == Output::kBF16) words[j] = m.cvt_bf16x2(y[j], y[1]);
    if constexpr (kOutput == Output::kF16) words[j] = m.cvt_f16x2(y[j], y[1]);
  }
  if (aligned && kBytes == 4) {
    m.st_global_v2(out, offset, words[0], words[1], writes & (column < columns));
  } else if (aligned) {
    m.template st_global<uint32_t>(out, offset, words[0], writes & (column < columns));
  } else {
    for (int j = 0; j < 2; ++j) {
      const auto inside = writes & (column + j < columns);
      if constexpr (kBytes == 4)
        m.template st_global<uint32_t>(out, offset + 4 * j, words[j], inside);
      else
        m.template st_global<uint16_t>(out, offset + 2 * j, m.template cast<uint16_t>(words[j] & 0xffffu), inside);
    }
  }
}

// Adds what is there already.
template <Output kOutput, class M, class F, class I, class P>
MXMOE_KERNEL void add_pair(M& m, const uint8_t* out, I offset, F (&y)[2], I column, int columns, P exists) {
  constexpr int kBytes = bytes_of(kOutput);
  using Element = std::conditional_t<kBytes == 4, uint32_t, uint16_t>;
  for (int j = 0; j < 2; ++j) {
    const auto word = m.template ld_global<Element>(out, offset + j * kBytes, exists & (column + j < columns));
    y[j] = y[j] + to_float<kOutput, 0>(m, m.template cast<uint32_t>(word));
  }
}

// Whether pairs of rows of `columns`, `stride` elements apart, are aligned.
template <Output kOutput>
MXMOE_KERNEL bool pairs_aligned(const void* out, int64_t stride, int columns) {
  return (columns | stride) % 2 == 0 && reinterpret_cast<uintptr_t>(out) % (2 * bytes_of(kOutput)) == 0;
}

// Zeros in the place of lines [first, end) of a tile of 128-byte lines, by one warp.
template <class M, class Tile>
MXMOE_KERNEL void clear_lines(M& m, Tile& tile, int first, int end) {
  using U = typename M::template lane<uint32_t>;
  static_assert(Tile::row_bytes == 128);
  for (int line = first; line < end; line += 4) {  // four lines of eight 16-byte pieces at once
    const auto bytes = m.lane_idx() * 16 + line * 128;
    m.st_shared_v4(m.template cast<uint32_t>(bytes) + m.shared_address(&tile), U{}, U{}, U{}, U{}, bytes < end * 128);
  }
}

}  // namespace mxmoe::cuda
