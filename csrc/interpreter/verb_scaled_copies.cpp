#include "cuda/verbs/scaled_copies.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto quantize_blocks_instantiated = &cuda::run_quantize_blocks<Launcher>;
[[gnu::used]] static const auto dequantize_instantiated = &cuda::run_dequantize<Launcher>;
[[gnu::used]] static const auto swizzle_scales_instantiated = &cuda::run_swizzle_scales<Launcher>;
}  // namespace mxmoe::interpreter
