// What the grouped GEMMs of all architectures share: the output's types, and its stores by pairs.
#pragma once
#include <cstdint>

#include "cuda/tile/types.h"

namespace mxmoe::cuda {

enum class Output : uint8_t { kF32, kBF16, kF16 };

// Two neighbouring columns (the first one even) of each lane's row: biased, rounded once, stored. expert -1: zeros. G
// has bias (experts, outputs) or null, outputs, out, out_stride.
template <Output kOutput, class M, class G, class F, class I, class P>
MXMOE_KERNEL void store_pair(M& m, const G& g, F (&y)[2], int expert, int64_t first_row, I row, I column, P writes) {
  using U = typename M::template lane<uint32_t>;
  constexpr int kBytes = kOutput == Output::kF32 ? 4 : 2;
  for (int j = 0; j < 2; ++j)
    if (g.bias && expert >= 0)
      y[j] = y[j] + m.template ld_global<float>(g.bias + int64_t{expert} * g.outputs, (column + j) * 4,
                                                column + j < g.outputs);
  uint8_t* out = static_cast<uint8_t*>(g.out) + first_row * g.out_stride * kBytes;
  const I offset = (row * static_cast<int>(g.out_stride) + column) * kBytes;
  U words[2];
  for (int j = 0; j < 2; ++j) {
    if constexpr (kOutput == Output::kF32) words[j] = __builtin_bit_cast(U, y[j]);
    if constexpr (kOutput == Output::kBF16) words[j] = m.cvt_bf16x2(y[j], y[1]);
    if constexpr (kOutput == Output::kF16) words[j] = m.cvt_f16x2(y[j], y[1]);
  }
  const bool aligned = (g.outputs | g.out_stride) % 2 == 0 && reinterpret_cast<uintptr_t>(g.out) % (2 * kBytes) == 0;
  if (aligned && kBytes == 4) {
    m.st_global_v2(out, offset, words[0], words[1], writes & (column < g.outputs));
  } else if (aligned) {
    m.template st_global<uint32_t>(out, offset, words[0], writes & (column < g.outputs));
  } else {
    for (int j = 0; j < 2; ++j) {
      const auto inside = writes & (column + j < g.outputs);
      if constexpr (kBytes == 4)
        m.template st_global<uint32_t>(out, offset + 4 * j, words[j], inside);
      else
        m.template st_global<uint16_t>(out, offset + 2 * j, m.template cast<uint16_t>(words[j] & 0xffffu), inside);
    }
  }
}

}  // namespace mxmoe::cuda
