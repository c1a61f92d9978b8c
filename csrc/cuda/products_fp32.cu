#include "cuda/launcher.h"
#include "cuda/verbs/products_fp32.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto grouped_mm_fp32_instantiated = &run_grouped_mm_fp32<Launcher>;
[[gnu::used]] static const auto grouped_mm_wgrad_fp32_instantiated = &run_grouped_mm_wgrad_fp32<Launcher>;
}  // namespace mxmoe::cuda
