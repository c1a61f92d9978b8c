// Bindings of permute, unpermute, swiglu and their backward forms: arguments as in mxmoe/backends/__init__.py, then
// (isa, threads).
#include "host/rows.h"

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

}  // namespace

void bind_rows(py::module_& m) {
  MXMOE_DEF(m, permute, (Tensor x, Tensor permutation, int64_t top_k, Tensor out, const std::string& isa, int threads),
            (x, permutation, top_k, out, threads));
  MXMOE_DEF(m, unpermute, (Tensor y, Tensor inverse, Tensor weights, Tensor out, const std::string& isa, int threads),
            (y, inverse, weights, out, threads));
  MXMOE_DEF(m, unpermute_backward,
            (Tensor dy, Tensor y, Tensor permutation, Tensor weights, Tensor rows_grad, Tensor weights_grad,
             const std::string& isa, int threads),
            (dy, y, permutation, weights, rows_grad, weights_grad, threads));
  MXMOE_DEF(m, swiglu,
            (Tensor h, Tensor offs, float alpha, std::optional<float> limit, float offset, bool interleaved, Tensor out,
             const std::string& isa, int threads),
            (h, offs, activation_of(alpha, limit, offset), interleaved, out, threads));
  MXMOE_DEF(m, swiglu_backward,
            (Tensor da, Tensor h, Tensor offs, float alpha, std::optional<float> limit, float offset, bool interleaved,
             Tensor dh, const std::string& isa, int threads),
            (da, h, offs, activation_of(alpha, limit, offset), interleaved, dh, threads));
}

}  // namespace mxmoe
