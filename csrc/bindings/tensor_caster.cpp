#include "bindings/tensor_caster.h"

#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace mxmoe {
namespace {

// torch's dtype objects are singletons, so an address is a dtype.
const std::vector<std::pair<PyObject*, DType>>& dtype_table() {
  static const auto* table = [] {
    auto* rows = new std::vector<std::pair<PyObject*, DType>>;
    py::module_ torch = py::module_::import("torch");
    const std::pair<const char*, DType> names[] = {
        {"float32", DType::kF32},      {"bfloat16", DType::kBF16},      {"float16", DType::kF16},
        {"uint8", DType::kU8},         {"int32", DType::kI32},          {"int64", DType::kI64},
        {"float8_e4m3fn", DType::kU8}, {"float8_e5m2", DType::kU8},     {"float8_e8m0fnu", DType::kU8},
        {"bool", DType::kU8},          {"float4_e2m1fn_x2", DType::kU8}};
    for (auto [name, dtype] : names)
      if (py::hasattr(torch, name)) rows->emplace_back(py::object(torch.attr(name)).release().ptr(), dtype);
    return rows;
  }();
  return *table;
}

}  // namespace

Tensor tensor_from_python(py::handle object) {
  Tensor t;
  if (object.is_none()) return t;
  py::object dtype = object.attr("dtype");
  bool known = false;
  for (auto [address, value] : dtype_table())
    if (address == dtype.ptr()) t.dtype = value, known = true;
  if (!known)
    throw py::type_error("dtype " + py::cast<std::string>(py::str(dtype)) + " is not supported by the host backend");
  py::tuple shape = object.attr("shape"), strides = object.attr("stride")();
  t.ndim = static_cast<int>(shape.size());
  if (t.ndim > kMaxDims) throw py::value_error("the host backend takes tensors of at most 4 dimensions");
  int64_t numel = 1;
  for (int i = 0; i < t.ndim; ++i) {
    t.sizes[i] = shape[i].cast<int64_t>();
    t.strides[i] = strides[i].cast<int64_t>();
    numel *= t.sizes[i];
  }
  t.data = reinterpret_cast<void*>(object.attr("data_ptr")().cast<uintptr_t>());
  static char empty;  // a tensor without elements has a null pointer but is present
  if (numel == 0 && !t.data) t.data = &empty;
  return t;
}

}  // namespace mxmoe
