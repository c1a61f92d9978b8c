#include "cuda/ladder/ladder.h"
#include "cuda/launcher.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto instantiated = &run_ladder<Launcher>;
}
