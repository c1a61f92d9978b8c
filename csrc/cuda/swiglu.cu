#include "cuda/launcher.h"
#include "cuda/verbs/swiglu.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto swiglu_instantiated = &run_swiglu<Launcher>;
[[gnu::used]] static const auto swiglu_backward_instantiated = &run_swiglu_backward<Launcher>;
}  // namespace mxmoe::cuda
