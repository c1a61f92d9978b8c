#include "cuda/verbs/route.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto route_instantiated = &cuda::run_route<Launcher>;
[[gnu::used]] static const auto route_backward_instantiated = &cuda::run_route_backward<Launcher>;
[[gnu::used]] static const auto sort_by_expert_instantiated = &cuda::run_sort_by_expert<Launcher>;
}  // namespace mxmoe::interpreter
