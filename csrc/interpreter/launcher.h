// Runs a kernel's launch on a Grid (see cuda/launch.h); afterwards `sites` are the calls that ran, of each launch. With
// a program, adds it to that instead.
#pragma once
#include <vector>

#include "cuda/launch.h"
#include "interpreter/machine.h"

namespace mxmoe::interpreter {

// Launches of several devices that will run together, and where the next one goes (see Launch).
struct Program {
  std::vector<Launch> launches;
  int device = 0, after = -1;
};

struct Launcher {
  using machine = Warp;
  Options options;
  Program* program;
  std::vector<Site> sites;

  int num_sms() const { return options.num_sms; }

  cuda::TensorMapArgs tensor_map(const Tensor& t, uint32_t box_rows, uint32_t box_bytes, cuda::Swizzle swizzle) const {
    return cuda::tensor_map_args(t, box_rows, box_bytes, swizzle);
  }

  template <class K>
  void run(int64_t num_ctas, const typename K::template globals_type<Warp>& g,
           const std::vector<cuda::Argument>& arguments) {
    Launch launch{K::name,
                  0,
                  -1,
                  static_cast<int>(num_ctas),
                  K::warps,
                  K::cluster,
                  sizeof(typename K::shared_type),
                  buffers(arguments),
                  [g](Warp& m) { K::run(m, g); }};
    if (program) {
      launch.device = program->device, launch.after = program->after;
      program->after = static_cast<int>(program->launches.size());  // of the verb's next launch
      program->launches.push_back(std::move(launch));
    } else {
      run_all({std::move(launch)});
    }
  }

  void run_all(std::vector<Launch> launches);
  static std::vector<Buffer> buffers(const std::vector<cuda::Argument>& arguments);
};

}  // namespace mxmoe::interpreter
