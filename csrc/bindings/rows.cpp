// Bindings of permute, unpermute, swiglu and their backward forms: arguments as in mxmoe/backends/__init__.py, then
// (isa, threads).
#include "host/rows.h"

#include <optional>
#include <tuple>

#include "bindings/copies.h"
#include "bindings/tensor_caster.h"
#include "bindings/verbs.h"

namespace py = pybind11;

namespace mxmoe {
namespace {

// m.def of a host function `f(args..., int threads)` as `f(args..., str isa, int threads)`, run without the GIL.
#define MXMOE_DEF(m, f, parameters, arguments)           \
  m.def(#f, [] parameters {                              \
    const std::string resolved = host::resolve_isa(isa); \
    py::gil_scoped_release release;                      \
    MXMOE_DISPATCH(resolved, f) arguments;               \
  })

host::Activation activation_of(float alpha, std::optional<float> limit, float offset) {
  return {alpha, limit.value_or(0.0f), offset, limit.has_value()};
}

// (format, floor, row values, row scales, column values, column scales), MX formats.
using MXCopies = std::optional<std::tuple<std::string, bool, Tensor, Tensor, Tensor, Tensor>>;

// Copies of the (rows, cols) that a verb makes; with them its output is absent.
class Fused {
 public:
  Fused(const MXCopies& copies, DType dtype, int64_t rows, int64_t cols, const Tensor& offs) {
    if (!copies) return;
    const auto& [format, floor, row_values, row_scales, column_values, column_scales] = *copies;
    const Tensor x{nullptr, dtype, 3, {1, rows, cols}, {rows * cols, cols, 1}};
    args_.emplace(x, offs, format_of(format), floor, copy_of(row_values, row_scales),
                  copy_of(column_values, column_scales));
  }
  const host::QuantizeArgs* args() const { return args_ ? &args_->args : nullptr; }

 private:
  std::optional<CopiesArgs> args_;
};

}  // namespace

void bind_rows(py::module_& m) {
  MXMOE_DEF(
      m, permute,
      (Tensor x, Tensor permutation, int64_t top_k, Tensor out, Tensor offs, MXCopies copies, const std::string& isa,
       int threads),
      (x, permutation, top_k, out, Fused(copies, x.dtype, permutation.sizes[0], x.sizes[1], offs).args(), threads));
  MXMOE_DEF(m, unpermute, (Tensor y, Tensor inverse, Tensor weights, Tensor out, const std::string& isa, int threads),
            (y, inverse, weights, out, threads));
  MXMOE_DEF(m, unpermute_backward,
            (Tensor dy, Tensor y, Tensor permutation, Tensor weights, Tensor rows_grad, Tensor weights_grad,
             Tensor offs, MXCopies copies, const std::string& isa, int threads),
            (dy, y, permutation, weights, rows_grad, weights_grad,
             Fused(copies, DType::kBF16, permutation.sizes[0], dy.sizes[1], offs).args(), threads));
  MXMOE_DEF(m, swiglu,
            (Tensor h, Tensor offs, float alpha, std::optional<float> limit, float offset, bool interleaved, Tensor out,
             MXCopies copies, const std::string& isa, int threads),
            (h, offs, activation_of(alpha, limit, offset), interleaved, out,
             Fused(copies, h.dtype, h.sizes[0], h.sizes[1] / 2, offs).args(), threads));
  MXMOE_DEF(m, swiglu_backward,
            (Tensor da, Tensor h, Tensor offs, float alpha, std::optional<float> limit, float offset, bool interleaved,
             Tensor dh, MXCopies copies, const std::string& isa, int threads),
            (da, h, offs, activation_of(alpha, limit, offset), interleaved, dh,
             Fused(copies, h.dtype, h.sizes[0], h.sizes[1], offs).args(), threads));
}

}  // namespace mxmoe
