// Runs a kernel's launch on the current device (see cuda/launch.h). Nothing waits for the device.
#pragma once
#include <cuda_runtime.h>

#include <vector>

#include "cuda/launch.h"
#if defined(__CUDACC__)
#include "cuda/tile/device.h"
#endif

namespace mxmoe::cuda {

struct Device;
struct DeviceTensorMap;

void check(cudaError_t error, const char* what);  // throws std::runtime_error
DeviceTensorMap encode(const TensorMapArgs& args);

struct Launcher {
  using machine = Device;
  cudaStream_t stream;
  int sms;

  explicit Launcher(uintptr_t stream);
  int num_sms() const { return sms; }

#if defined(__CUDACC__)
  DeviceTensorMap tensor_map(const Tensor& t, uint32_t box_rows, uint32_t box_bytes, Swizzle swizzle) const {
    return encode(tensor_map_args(t, box_rows, box_bytes, swizzle));
  }

  template <class K>
  void run(int64_t num_ctas, const typename K::template globals_type<Device>& g, const std::vector<Argument>&);
#endif
};

#if defined(__CUDACC__)
// CTAs of an SM that registers are kept for: one where shared memory lets no second one on, else as the compiler likes.
template <class K>
constexpr int kCtasPerSm = sizeof(typename K::shared_type) > 114 * 1024 ? 1 : 0;

template <class K>
__global__ void __launch_bounds__(K::warps * 32, kCtasPerSm<K>)
    entry(const __grid_constant__ typename K::template globals_type<Device> g) {
  Device m;
  K::run(m, g);
}

template <class K>
void Launcher::run(int64_t num_ctas, const typename K::template globals_type<Device>& g, const std::vector<Argument>&) {
  if (num_ctas == 0) return;
  constexpr int kShared = sizeof(typename K::shared_type);
  check(cudaFuncSetAttribute(entry<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), K::name);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {K::cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(num_ctas), config.blockDim = K::warps * 32;
  config.dynamicSmemBytes = kShared, config.stream = stream;
  config.attrs = &cluster, config.numAttrs = K::cluster > 1;
  check(cudaLaunchKernelEx(&config, entry<K>, g), K::name);
}
#endif

}  // namespace mxmoe::cuda
