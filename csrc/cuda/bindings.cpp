// The Python module mxmoe._cuda. Every verb ends with the stream, as an integer.
#include <cuda_runtime.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/tensor_caster.h"
#include "cuda/launcher.h"
#include "cuda/verbs.h"

namespace {

template <typename... Args>
auto bound(void (*verb)(mxmoe::cuda::Launcher&, Args...)) {
  return [verb](std::remove_cvref_t<Args>... args, uintptr_t stream) {
    mxmoe::cuda::Launcher launcher(stream);
    verb(launcher, args...);
  };
}

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  using mxmoe::cuda::Launcher;
  m.doc() = "mxmoe's GPU kernels";
  m.def("device_count", &device_count, "0 where there is no driver.");
  m.def("quantize", bound(&mxmoe::cuda::run_quantize<Launcher>));
  m.def("quantize_nvfp4", bound(&mxmoe::cuda::run_quantize_nvfp4<Launcher>));
  m.def("quantize_blocks", bound(&mxmoe::cuda::run_quantize_blocks<Launcher>));
  m.def("dequantize", bound(&mxmoe::cuda::run_dequantize<Launcher>));
  m.def("swizzle_scales", bound(&mxmoe::cuda::run_swizzle_scales<Launcher>));
  m.def("grouped_mm_fp32", bound(&mxmoe::cuda::run_grouped_mm_fp32<Launcher>));
  m.def("grouped_mm_wgrad_fp32", bound(&mxmoe::cuda::run_grouped_mm_wgrad_fp32<Launcher>));
  m.def("grouped_mm_sm90", bound(&mxmoe::cuda::run_grouped_mm_sm90<Launcher>));
  m.def("grouped_mm_sm100", bound(&mxmoe::cuda::run_grouped_mm_sm100<Launcher>));
  m.def("grouped_mm_wgrad_sm100", bound(&mxmoe::cuda::run_grouped_mm_wgrad_sm100<Launcher>));
  m.def("grouped_mm_wgrad_sm90", bound(&mxmoe::cuda::run_grouped_mm_wgrad_sm90<Launcher>));
  m.def("permute", bound(&mxmoe::cuda::run_permute<Launcher>));
  m.def("unpermute", bound(&mxmoe::cuda::run_unpermute<Launcher>));
  m.def("unpermute_backward", bound(&mxmoe::cuda::run_unpermute_backward<Launcher>));
  m.def("weights_grad", bound(&mxmoe::cuda::run_weights_grad<Launcher>));
  m.def("swiglu", bound(&mxmoe::cuda::run_swiglu<Launcher>));
  m.def("exchange_schedule", bound(&mxmoe::cuda::run_exchange_schedule<Launcher>));
  m.def("dispatch", bound(&mxmoe::cuda::run_dispatch<Launcher>));
  m.def("combine", bound(&mxmoe::cuda::run_combine<Launcher>));
  m.def("swiglu_backward", bound(&mxmoe::cuda::run_swiglu_backward<Launcher>));
  m.def("ladder", bound(&mxmoe::cuda::run_ladder<Launcher>));
  m.def("route", bound(&mxmoe::cuda::run_route<Launcher>));
  m.def("route_backward", bound(&mxmoe::cuda::run_route_backward<Launcher>));
  m.def("sort_by_expert", bound(&mxmoe::cuda::run_sort_by_expert<Launcher>));
  m.def("moe_decode", bound(&mxmoe::cuda::run_moe_decode<Launcher>));
}
