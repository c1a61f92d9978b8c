// Bindings of the probes of the machine's ceilings, for benchmarks: arguments, then (isa, threads).
#include "host/ceilings.h"

#include <stdexcept>

#include "bindings/tensor_caster.h"
#include "bindings/verbs.h"

namespace py = pybind11;

namespace mxmoe {
namespace {

void check_bytes(const Tensor& t, int64_t bytes) {
  if (t.dtype != DType::kU8 || t.ndim != 1 || t.strides[0] != 1 || bytes < 0 || bytes > t.sizes[0])
    throw std::invalid_argument("expected a contiguous vector of at least " + std::to_string(bytes) + " bytes");
}

int64_t multiply_add(bool bf16, int64_t steps, const std::string& isa, int threads) {
  const std::string resolved = host::resolve_isa(isa);
  py::gil_scoped_release release;
  return MXMOE_DISPATCH(resolved, multiply_add)(bf16, steps, threads);
}

void copy_bytes(Tensor to, Tensor from, int64_t bytes, bool stream, const std::string& isa, int threads) {
  check_bytes(to, bytes), check_bytes(from, bytes);
  const std::string resolved = host::resolve_isa(isa);
  py::gil_scoped_release release;
  MXMOE_DISPATCH(resolved, copy_bytes)(to.ptr<char>(), from.ptr<char>(), bytes, stream, threads);
}

int64_t read_bytes(Tensor from, int64_t bytes, const std::string& isa, int threads) {
  check_bytes(from, bytes);
  const std::string resolved = host::resolve_isa(isa);
  py::gil_scoped_release release;
  return MXMOE_DISPATCH(resolved, read_bytes)(from.ptr<char>(), bytes, threads);
}

}  // namespace

void bind_ceilings(py::module_& m) {
  m.def("multiply_add", &multiply_add);
  m.def("copy_bytes", &copy_bytes);
  m.def("read_bytes", &read_bytes);
}

}  // namespace mxmoe
