#include "interpreter/launcher.h"

namespace mxmoe::interpreter {

void Launcher::run_all(std::vector<Launch> launches) {
  Grid grid(options, std::move(launches));
  grid.run();
  for (const Site& site : grid.sites()) sites.push_back(site);
}

// From the first to the last element of each tensor.
std::vector<Buffer> Launcher::buffers(const std::vector<cuda::Argument>& arguments) {
  std::vector<Buffer> all;
  for (const auto& [name, t, use] : arguments) {
    int64_t last = 0;
    bool empty = !t;
    for (int i = 0; i < t.ndim; ++i) last += (t.sizes[i] - 1) * t.strides[i], empty = empty || !t.sizes[i];
    if (!empty) all.push_back({name, t.data, static_cast<size_t>((last + 1) * cuda::bytes_of(t.dtype)), use});
  }
  return all;
}

}  // namespace mxmoe::interpreter
