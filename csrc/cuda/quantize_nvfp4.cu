#include "cuda/launcher.h"
#include "cuda/verbs/quantize_nvfp4.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto instantiated = &run_quantize_nvfp4<Launcher>;
}
