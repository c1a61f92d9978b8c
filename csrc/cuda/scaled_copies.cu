#include "cuda/launcher.h"
#include "cuda/verbs/scaled_copies.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto quantize_blocks_instantiated = &run_quantize_blocks<Launcher>;
[[gnu::used]] static const auto dequantize_instantiated = &run_dequantize<Launcher>;
[[gnu::used]] static const auto swizzle_scales_instantiated = &run_swizzle_scales<Launcher>;
}  // namespace mxmoe::cuda
