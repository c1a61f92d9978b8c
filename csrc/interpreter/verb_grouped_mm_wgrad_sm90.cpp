#include "cuda/verbs/grouped_mm_wgrad_sm90.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto instantiated = &cuda::run_grouped_mm_wgrad_sm90<Launcher>;
}
