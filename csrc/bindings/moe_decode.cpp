// moe_decode: the experts of a few tokens in one call, so that the time is that of reading their weights.
#include <cstdint>
#include <optional>
#include <string>

#include "bindings/copies.h"
#include "bindings/operand.h"
#include "bindings/tensor_caster.h"
#include "bindings/verbs.h"
#include "host/memory.h"
#include "host/route.h"
#include "host/rows.h"

namespace py = pybind11;

namespace mxmoe {
namespace {

// Dense matrices, one after the other; first sized, then placed in one block.
class Arena {
 public:
  explicit Arena(int64_t bytes) : block_(bytes), next_(static_cast<uint8_t*>(block_.data())) {}

  Tensor matrix(DType dtype, int64_t rows, int64_t cols, int64_t bytes) {
    Tensor t{next_, dtype, 2, {rows, cols}, {cols, 1}};
    next_ += (rows * cols * bytes + 63) / 64 * 64;
    return t;
  }
  Tensor vector(DType dtype, int64_t length, int64_t bytes) {
    Tensor t = matrix(dtype, 1, length, bytes);
    return {t.data, dtype, 1, {length}, {1}};
  }

 private:
  host::Block block_;
  uint8_t* next_;
};

// Rows as the products read them: themselves, or their row copy in a block format (global scales per row).
Operand activation(const Tensor& rows, const std::string& format, const Tensor& offs, Arena& arena,
                   const std::string& isa, int threads) {
  static constexpr const char* kHighPrecision[] = {"fp32", "bf16", "fp16"};  // by DType
  for (const char* name : kHighPrecision)
    if (format == name) return {rows, {}, {}, kHighPrecision[static_cast<int>(rows.dtype)]};
  const Format f = format_of(format);
  const int64_t num_rows = rows.sizes[0], length = rows.sizes[1], block = block_of(f);
  const Tensor values = arena.matrix(DType::kU8, num_rows, (length * bits_of_element(f) + 7) / 8, 1);
  const Tensor scales = arena.matrix(DType::kU8, num_rows, (length + block - 1) / block, 1);
  const Tensor global = f == Format::kNvfp4 ? arena.vector(DType::kF32, num_rows, 4) : Tensor{};
  const Tensor x{rows.data, rows.dtype, 3, {1, num_rows, length}, {num_rows * length, length, 1}};
  const CopiesArgs copies(x, offs, f, false, copy_of(values, scales, global), {});
  MXMOE_DISPATCH(isa, quantize)(copies.args, threads);
  return {values, scales, global, format};
}

void moe_decode(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor s13, Tensor g13, const std::string& f13,
                Tensor b13, Tensor w2, Tensor s2, Tensor g2, const std::string& f2, Tensor b2, float alpha,
                std::optional<float> limit, float offset, bool interleaved, const std::string& act_format, Tensor out,
                const std::string& isa_name, int threads) {
  const std::string isa = host::resolve_isa(isa_name);
  const Operand up(w13, s13, g13, f13), down(w2, s2, g2, f2);
  py::gil_scoped_release release;
  const int64_t top_k = ids.sizes[1], num_rows = ids.sizes[0] * top_k, experts = w13.sizes[0], hidden = w13.sizes[1];
  const int64_t dim = x.sizes[1];
  const DType dtype = act_format == "fp32" ? DType::kF32 : DType::kBF16;
  // x's rows, hidden rows, activations and results, each at most twice (quantized), at 4 bytes a value; indices.
  Arena arena(8 * num_rows * (2 * dim + 2 * hidden + 64) + 16 * (num_rows + experts) + 4096);

  const Tensor counts = arena.vector(DType::kI32, experts, 4), offs = arena.vector(DType::kI32, experts, 4);
  const Tensor permutation = arena.vector(DType::kI32, num_rows, 4);
  const Tensor inverse = arena.matrix(DType::kI32, ids.sizes[0], top_k, 4);
  host::sort_by_expert(ids.ptr<int32_t>(), num_rows, experts, counts.ptr<int32_t>(), offs.ptr<int32_t>(),
                       permutation.ptr<int32_t>(), inverse.ptr<int32_t>(), threads);

  const Tensor rows = arena.matrix(x.dtype, num_rows, dim, size_of(x.dtype));
  MXMOE_DISPATCH(isa, permute)(x, permutation, top_k, rows, nullptr, threads);
  const Tensor h = arena.matrix(dtype, num_rows, hidden, size_of(dtype));
  multiply_groups(activation(rows, act_format, offs, arena, isa, threads), up, offs, b13, h, isa, threads);
  const Tensor a = arena.matrix(dtype, num_rows, hidden / 2, size_of(dtype));
  const host::Activation swiglu{alpha, limit.value_or(0.0f), offset, limit.has_value()};
  MXMOE_DISPATCH(isa, swiglu)(h, offs, swiglu, interleaved, a, nullptr, threads);
  const Tensor y = arena.matrix(dtype, num_rows, out.sizes[1], size_of(dtype));
  multiply_groups(activation(a, act_format, offs, arena, isa, threads), down, offs, b2, y, isa, threads);
  MXMOE_DISPATCH(isa, unpermute)(y, inverse, weights, out, threads);
}

}  // namespace

void bind_moe_decode(py::module_& m) {
  m.def("moe_decode", &moe_decode);
}

}  // namespace mxmoe
