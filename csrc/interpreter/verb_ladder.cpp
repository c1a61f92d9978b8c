#include "cuda/ladder/ladder.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto instantiated = &cuda::run_ladder<Launcher>;
}
