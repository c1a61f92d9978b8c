#include "cuda/launcher.h"
#include "cuda/verbs/peers.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto schedule_instantiated = &run_exchange_schedule<Launcher>;
[[gnu::used]] static const auto dispatch_instantiated = &run_dispatch<Launcher>;
[[gnu::used]] static const auto combine_instantiated = &run_combine<Launcher>;
}  // namespace mxmoe::cuda
