// Elements on their way between memory and FP32: words of four elements a lane, whatever their type.
#pragma once
#include "cuda/launch.h"
#include "cuda/tile/types.h"

namespace mxmoe::cuda {

enum class Input : uint8_t { kF32, kBF16, kF16 };

MXMOE_FACT int bytes_of(Input t) {
  return t == Input::kF32 ? 4 : 2;
}

// Whether every row (the last axis) starts at four elements' alignment and has a multiple of four; of no tensor, no.
inline bool in_fours(const Tensor& t) {
  if (t.ndim == 0) return false;
  const int64_t bytes = 4 * bytes_of(t.dtype);
  return reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(bytes) == 0 && t.sizes[t.ndim - 1] % 4 == 0 &&
         (t.ndim < 2 || t.strides[t.ndim - 2] % 4 == 0);
}

// body.template operator()<Input>() for the dtype of a tensor of floats.
template <typename Body>
void with_input(DType dtype, Body&& body) {
  if (dtype == DType::kF32) body.template operator()<Input::kF32>();
  if (dtype == DType::kBF16) body.template operator()<Input::kBF16>();
  if (dtype == DType::kF16) body.template operator()<Input::kF16>();
}

// FP32 from a word of shared memory: one FP32, or the low or high half.
template <Input kInput, int kHalf, class M, class U>
MXMOE_KERNEL auto to_float(M& m, U word) {
  using F = typename M::template lane<float>;
  if constexpr (kInput == Input::kF32) return __builtin_bit_cast(F, word);
  if constexpr (kInput == Input::kBF16) return __builtin_bit_cast(F, kHalf ? word & 0xffff0000u : word << 16);
  if constexpr (kInput == Input::kF16) return m.half_to_float(kHalf ? word >> 16 : word & 0xffffu);
}

MXMOE_FACT int smaller(int a, int b) {
  return a < b ? a : b;
}
template <typename U>
MXMOE_KERNEL U larger(U a, U b) {
  return a > b ? a : b;
}

// `count` bytes of a word each lane holds, to base + offset: at once where rows are aligned, else one by one.
template <class M, class U, class I, class P>
MXMOE_KERNEL void store_bytes(M& m, uint8_t* base, I offset, U word, I count, bool aligned, P p) {
  if (aligned) return m.template st_global<uint32_t>(base, offset, word, p & (count >= 4));
  for (int i = 0; i < 4; ++i)
    m.template st_global<uint8_t>(base, offset + i, m.template cast<uint8_t>(word >> (8 * i) & 255u), p & (count > i));
}

// Four elements of kBytes bytes of each lane, as kBytes words, from `base` + first elements on; zero past `length` and
// where there is no row. `aligned`: every row starts at, and is as long as, a multiple of 4 * kBytes bytes.
template <int kBytes, class M, class U, class I>
MXMOE_KERNEL void load_words(M& m, const void* base, I first, int length, bool aligned, bool exists,
                             U (&word)[kBytes]) {
  const I offset = first * kBytes;
  const auto inside = [&](int j) { return (first + j < length) & (m.splat(exists ? 1 : 0) != 0); };
  if (aligned) {
    typename M::template registers<uint32_t, kBytes> words;
    if constexpr (kBytes == 1) words[0] = m.template ld_global<uint32_t>(base, offset, inside(0));
    if constexpr (kBytes == 2) m.ld_global_v2(words, base, offset, inside(0));
    if constexpr (kBytes == 4) m.ld_global_v4(words, base, offset, inside(0));
    for (int i = 0; i < kBytes; ++i) word[i] = words[i];
    return;
  }
  using Element = std::conditional_t<kBytes == 1, uint8_t, std::conditional_t<kBytes == 2, uint16_t, uint32_t>>;
  for (int i = 0; i < kBytes; ++i) word[i] = U{};
  for (int j = 0; j < 4; ++j) {
    const auto element = m.template ld_global<Element>(base, offset + j * kBytes, inside(j));
    word[j * kBytes / 4] = word[j * kBytes / 4] | m.template cast<uint32_t>(element) << (8 * (j * kBytes % 4));
  }
}

// The inverse; `writes` false: nothing.
template <int kBytes, class M, class U, class I>
MXMOE_KERNEL void store_words(M& m, void* base, I first, int length, bool aligned, bool writes,
                              const U (&word)[kBytes]) {
  if (!writes) return;
  const I offset = first * kBytes;
  if (aligned) {
    const auto inside = first < length;
    if constexpr (kBytes == 1) m.template st_global<uint32_t>(base, offset, word[0], inside);
    if constexpr (kBytes == 2) m.st_global_v2(base, offset, word[0], word[1], inside);
    if constexpr (kBytes == 4) m.st_global_v4(base, offset, word[0], word[1], word[2], word[3], inside);
    return;
  }
  using Element = std::conditional_t<kBytes == 1, uint8_t, std::conditional_t<kBytes == 2, uint16_t, uint32_t>>;
  for (int j = 0; j < 4; ++j)
    m.template st_global<Element>(base, offset + j * kBytes,
                                  m.template cast<Element>(word[j * kBytes / 4] >> (8 * (j * kBytes % 4))),
                                  first + j < length);
}

template <Input kInput, class M, class U, class F>
MXMOE_KERNEL void to_floats(M& m, const U (&word)[bytes_of(kInput)], F (&x)[4]) {
  for (int j = 0; j < 4; ++j) {
    if constexpr (kInput == Input::kF32)
      x[j] = to_float<kInput, 0>(m, word[j]);
    else
      x[j] = j % 2 ? to_float<kInput, 1>(m, word[j / 2]) : to_float<kInput, 0>(m, word[j / 2]);
  }
}

// Rounded once.
template <Input kOutput, class M, class F, class U>
MXMOE_KERNEL void from_floats(M& m, const F (&y)[4], U (&word)[bytes_of(kOutput)]) {
  for (int i = 0; i < bytes_of(kOutput); ++i) {
    if constexpr (kOutput == Input::kF32) word[i] = __builtin_bit_cast(U, y[i]);
    if constexpr (kOutput == Input::kBF16) word[i] = m.cvt_bf16x2(y[2 * i], y[2 * i + 1]);
    if constexpr (kOutput == Input::kF16) word[i] = m.cvt_f16x2(y[2 * i], y[2 * i + 1]);
  }
}

}  // namespace mxmoe::cuda
