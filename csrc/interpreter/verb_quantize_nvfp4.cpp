#include "cuda/verbs/quantize_nvfp4.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto instantiated = &cuda::run_quantize_nvfp4<Launcher>;
}
