#include <cuda.h>

#include <stdexcept>
#include <string>

#include "cuda/launcher.h"

namespace mxmoe::cuda {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error));
}

Launcher::Launcher(uintptr_t s) : stream(reinterpret_cast<cudaStream_t>(s)) {
  int device = 0;
  check(cudaGetDevice(&device), "current device");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "number of SMs");
}

// The driver's encoder, looked up at run time: the module does not link the driver. It takes no empty matrix, of which
// no kernel asks for a box.
DeviceTensorMap encode(const TensorMapArgs& a) {
  if (!a.rows || !a.columns) return {};
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "TMA");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  static_assert(sizeof(DeviceTensorMap) == sizeof(CUtensorMap), "a TMA descriptor has 128 bytes");
  static constexpr CUtensorMapSwizzle kSwizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
                                                     CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B};
  const auto type = [&] {
    switch (a.dtype) {
      case DType::kF32:
        return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
      case DType::kBF16:
        return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
      case DType::kF16:
        return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
      case DType::kI32:
        return CU_TENSOR_MAP_DATA_TYPE_INT32;
      case DType::kI64:
        return CU_TENSOR_MAP_DATA_TYPE_INT64;
      default:
        return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    }
  }();
  const cuuint64_t sizes[] = {a.columns, a.rows}, strides[] = {a.row_bytes};
  const cuuint32_t box[] = {a.box_columns, a.box_rows}, steps[] = {1, 1};
  CUtensorMap map;
  const CUresult result = encoder(&map, type, 2, a.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  kSwizzles[static_cast<int>(a.swizzle)], CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("CUDA: cuTensorMapEncodeTiled refuses, code " + std::to_string(result));
  return __builtin_bit_cast(DeviceTensorMap, map);
}

}  // namespace mxmoe::cuda
