#include "cuda/verbs/swiglu.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto swiglu_instantiated = &cuda::run_swiglu<Launcher>;
[[gnu::used]] static const auto swiglu_backward_instantiated = &cuda::run_swiglu_backward<Launcher>;
}  // namespace mxmoe::interpreter
