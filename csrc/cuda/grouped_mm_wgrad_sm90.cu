#include "cuda/launcher.h"
#include "cuda/verbs/grouped_mm_wgrad_sm90.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto instantiated = &run_grouped_mm_wgrad_sm90<Launcher>;
}
