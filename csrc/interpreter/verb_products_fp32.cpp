#include "cuda/verbs/products_fp32.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto grouped_mm_fp32_instantiated = &cuda::run_grouped_mm_fp32<Launcher>;
[[gnu::used]] static const auto grouped_mm_wgrad_fp32_instantiated = &cuda::run_grouped_mm_wgrad_fp32<Launcher>;
}  // namespace mxmoe::interpreter
