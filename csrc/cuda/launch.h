// What the `launch` of every kernel is written over: tensors in, a launcher that starts the kernel. The launcher of the
// interpreter (interpreter/launcher.h) runs it on a Grid, that of the GPU (cuda/launcher.h) on a stream.
//
//   L::machine                                          the Machine
//   l.tensor_map(t, box_rows, box_bytes, swizzle)       a TMA descriptor of t's last two dimensions
//   l.num_sms()                                         CTAs of a persistent kernel
//   l.template run<K>(num_ctas, globals, arguments)     K: name, warps, CTAs of a cluster, of which num_ctas is a
//                                                       multiple, shared_type, globals_type<M>, run(m, globals)
#pragma once
#include <cstdint>
#include <string>

#include "cuda/tile/tensor_map.h"
#include "tensor.h"

namespace mxmoe::cuda {

enum class Use : uint8_t { kRead, kWritten, kUpdated };  // updated: read and written

// A tensor that the kernel may touch.
struct Argument {
  std::string name;
  Tensor tensor;
  Use use = Use::kRead;
};

inline int64_t bytes_of(DType t) {
  return t == DType::kI64 ? 8 : t == DType::kF32 || t == DType::kI32 ? 4 : t == DType::kU8 ? 1 : 2;
}

// The last two dimensions of t as one matrix (leading dimensions stacked), in boxes of box_rows x box_bytes.
inline TensorMapArgs tensor_map_args(const Tensor& t, uint32_t box_rows, uint32_t box_bytes, Swizzle swizzle) {
  const auto element = static_cast<uint32_t>(bytes_of(t.dtype));
  int64_t rows = 1;
  for (int i = 0; i + 1 < t.ndim; ++i) rows *= t.sizes[i];
  TensorMapArgs args;
  args.data = t.data;
  args.rows = static_cast<uint64_t>(rows), args.columns = static_cast<uint64_t>(t.sizes[t.ndim - 1]);
  args.row_bytes = static_cast<uint64_t>(t.strides[t.ndim - 2]) * element;
  args.box_rows = box_rows, args.box_columns = box_bytes / element, args.element_bytes = element;
  args.dtype = t.dtype;
  args.swizzle = swizzle;
  return args;
}

}  // namespace mxmoe::cuda
