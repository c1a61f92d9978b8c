// The kernels of csrc/cuda/kernels run by the interpreter: tensors in host memory, arguments checked by the caller.
// Each returns the call sites that ran.
#pragma once
#include <string>
#include <vector>

#include "cuda/tile/tensor_map.h"
#include "interpreter/grid.h"
#include "layout.h"
#include "tensor.h"

namespace mxmoe::interpreter {

inline int64_t bytes_of(DType t) {
  return t == DType::kI64 ? 8 : t == DType::kF32 || t == DType::kI32 ? 4 : t == DType::kU8 ? 1 : 2;
}

inline Buffer buffer(const char* name, const Tensor& t, bool writable) {
  int64_t extent = bytes_of(t.dtype);
  for (int i = 0; i < t.ndim; ++i)
    extent = t.sizes[i] ? extent + (t.sizes[i] - 1) * t.strides[i] * bytes_of(t.dtype) : 0;
  for (int i = 0; i < t.ndim; ++i)
    if (!t.sizes[i]) extent = 0;
  return {name, t ? t.data : nullptr, static_cast<size_t>(extent), writable};
}

// The last two dimensions of t as one matrix (leading dimensions stacked), in boxes of box_rows x box_bytes.
inline cuda::TensorMapArgs tensor_map(const Tensor& t, uint32_t box_rows, uint32_t box_bytes, cuda::Swizzle swizzle) {
  const auto element = static_cast<uint32_t>(bytes_of(t.dtype));
  int64_t rows = 1;
  for (int i = 0; i + 1 < t.ndim; ++i) rows *= t.sizes[i];
  return {t.data,
          static_cast<uint64_t>(rows),
          static_cast<uint64_t>(t.sizes[t.ndim - 1]),
          static_cast<uint64_t>(t.strides[t.ndim - 2]) * element,
          box_rows,
          box_bytes / element,
          element,
          swizzle};
}

struct QuantizeCopy {
  Tensor values, scales;
};

// x (B, R, L), rows 16 bytes apart; B = 1 with offs. 8-bit MX formats.
std::vector<Site> quantize(const Tensor& x, const Tensor& offs, const std::string& format, bool floor, bool blocked,
                           const QuantizeCopy& row, const QuantizeCopy& column, const Options& options);

// values (lines, bytes), lines 16 bytes apart; scales blocked; global FP32 per line, NVFP4 only. b's lines: experts
// stacked.
struct GemmOperand {
  Tensor values, scales, global;
  std::string format;  // "bf16", "fp16", "mxfp8", "mxfp8_e5m2", "nvfp4"
};

// sm_100a's grouped_mm. offs (E,); bias FP32 (E, O) or none; out (M, O) FP32, BF16 or FP16.
std::vector<Site> grouped_mm_sm100(const GemmOperand& a, const GemmOperand& b, const Tensor& offs, const Tensor& bias,
                                   const Tensor& out, const Options& options);

}  // namespace mxmoe::interpreter
