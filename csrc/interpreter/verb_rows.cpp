#include "cuda/verbs/rows.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto permute_instantiated = &cuda::run_permute<Launcher>;
[[gnu::used]] static const auto unpermute_instantiated = &cuda::run_unpermute<Launcher>;
[[gnu::used]] static const auto unpermute_backward_instantiated = &cuda::run_unpermute_backward<Launcher>;
[[gnu::used]] static const auto weights_grad_instantiated = &cuda::run_weights_grad<Launcher>;
}  // namespace mxmoe::interpreter
