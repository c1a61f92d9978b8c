#include "cuda/verbs/peers.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto schedule_instantiated = &cuda::run_exchange_schedule<Launcher>;
[[gnu::used]] static const auto dispatch_instantiated = &cuda::run_dispatch<Launcher>;
[[gnu::used]] static const auto combine_instantiated = &cuda::run_combine<Launcher>;
}  // namespace mxmoe::interpreter
