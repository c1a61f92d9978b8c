#include "cuda/verbs/cluster_copy.h"
#include "interpreter/launcher.h"

namespace mxmoe::interpreter {
[[gnu::used]] static const auto instantiated = &cuda::run_cluster_copy<Launcher>;
}
