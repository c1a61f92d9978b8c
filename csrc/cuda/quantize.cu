#include "cuda/launcher.h"
#include "cuda/verbs/quantize.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto instantiated = &run_quantize<Launcher>;
}
