#include "cuda/launcher.h"
#include "cuda/verbs/moe_decode.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto instantiated = &run_moe_decode<Launcher>;
}
