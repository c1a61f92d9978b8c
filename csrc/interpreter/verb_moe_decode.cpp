#include "cuda/verbs/moe_decode.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto instantiated = &cuda::run_moe_decode<Launcher>;
}
