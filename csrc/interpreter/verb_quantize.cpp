#include "cuda/verbs/quantize.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto instantiated = &cuda::run_quantize<Launcher>;
}
