#pragma once
#include "cuda/kernels/dequantize.h"
#include "cuda/kernels/quantize_blocks.h"
#include "cuda/kernels/swizzle_scales.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

template <class L>
void run_quantize_blocks(L& l, const Tensor& x, const Tensor& offs, const std::string& format, bool floor,
                         const std::string& scope, std::optional<int64_t> seed, bool hadamard, bool four_six,
                         bool block_2d, bool column, int64_t stream, const Tensor& values, const Tensor& scales,
                         const Tensor& global) {
  const quantize_blocks::Options options{floor,
                                         hadamard,
                                         four_six,
                                         block_2d,
                                         seed.has_value(),
                                         static_cast<uint64_t>(seed.value_or(0)),
                                         static_cast<uint32_t>(stream)};
  with_format(format, [&]<Format kFormat>() {
    quantize_blocks::launch<kFormat>(l, x, offs, options, column, scope_of(scope), values, scales, global);
  });
}

template <class L>
void run_dequantize(L& l, const Tensor& values, const Tensor& scales, const Tensor& global, const Tensor& offs,
                    const std::string& format, bool column, const std::string& scope, const Tensor& out) {
  with_format(format, [&]<Format kFormat>() {
    dequantize::launch<kFormat>(l, values, scales, global, offs, column, scope_of(scope), out);
  });
}

template <class L>
void run_swizzle_scales(L& l, const Tensor& plain, const Tensor& blocked, const Tensor& offs, bool column,
                        int64_t block, bool inverse) {
  swizzle_scales::launch(l, plain, blocked, offs, column, block, inverse);
}

}  // namespace mxmoe::cuda
