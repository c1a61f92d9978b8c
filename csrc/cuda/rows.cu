#include "cuda/launcher.h"
#include "cuda/verbs/rows.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto permute_instantiated = &run_permute<Launcher>;
[[gnu::used]] static const auto unpermute_instantiated = &run_unpermute<Launcher>;
[[gnu::used]] static const auto unpermute_backward_instantiated = &run_unpermute_backward<Launcher>;
[[gnu::used]] static const auto weights_grad_instantiated = &run_weights_grad<Launcher>;
}  // namespace mxmoe::cuda
