#include "cuda/launcher.h"
#include "cuda/verbs/cluster_copy.h"

namespace mxmoe::cuda {
[[gnu::used]] static const auto instantiated = &run_cluster_copy<Launcher>;
}
