#include "cuda/launcher.h"
#include "cuda/verbs/route.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto route_instantiated = &run_route<Launcher>;
[[gnu::used]] static const auto route_backward_instantiated = &run_route_backward<Launcher>;
[[gnu::used]] static const auto sort_by_expert_instantiated = &run_sort_by_expert<Launcher>;
}  // namespace mxmoe::cuda
