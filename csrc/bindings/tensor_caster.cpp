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

// The part of DLPack 1 (dlpack.h) that torch offers to C code: what a tensor is, without calls into Python. A tenth of
// the time, which counts where a verb takes dozens of tensors for a fraction of a millisecond.
struct DlTensor {
  void* data;
  int32_t device[2];
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DlExchange {
  uint32_t major, minor;
  void *older, *allocate, *managed_from_python, *managed_to_python;
  int (*tensor_from_python)(void* object, DlTensor* out);
};

// Where torch has it, else null.
const DlExchange* dl_exchange() {
  static const DlExchange* const exchange = []() -> const DlExchange* {
    const py::object type = py::module_::import("torch").attr("Tensor");
    if (!py::hasattr(type, "__dlpack_c_exchange_api__")) return nullptr;
    const auto capsule = type.attr("__dlpack_c_exchange_api__").cast<py::capsule>();
    const auto* api = capsule.get_pointer<DlExchange>();
    return api->major == 1 ? api : nullptr;
  }();
  return exchange;
}

bool dtype_of(const DlTensor& t, DType& dtype) {
  enum { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6, kE4M3 = 10, kE5M2 = 12, kE8M0 = 14 };
  if (t.lanes != 1) return false;
  if (t.bits == 32 && (t.code == kFloat || t.code == kInt))
    return dtype = t.code == kInt ? DType::kI32 : DType::kF32, true;
  if (t.bits == 16 && (t.code == kFloat || t.code == kBFloat))
    return dtype = t.code == kFloat ? DType::kF16 : DType::kBF16, true;
  if (t.bits == 64 && t.code == kInt) return dtype = DType::kI64, true;
  const bool byte = t.code == kUInt || t.code == kBool || t.code == kE4M3 || t.code == kE5M2 || t.code == kE8M0;
  return dtype = DType::kU8, t.bits == 8 && byte;
}

static char nothing;  // a tensor without elements has a null pointer but is present

PyTypeObject* type_of_tensors() {
  static auto* const type = py::object(py::module_::import("torch").attr("Tensor")).release().ptr();
  return reinterpret_cast<PyTypeObject*>(type);
}
PyTypeObject* type_of_parameters() {
  static auto* const type = py::object(py::module_::import("torch.nn").attr("Parameter")).release().ptr();
  return reinterpret_cast<PyTypeObject*>(type);
}

bool from_dlpack(py::handle object, Tensor& t, bool on_cpu) {
  constexpr int32_t kCpu = 1;
  DlTensor d;
  if (!dl_exchange() || !PyObject_TypeCheck(object.ptr(), type_of_tensors())) return false;
  if (dl_exchange()->tensor_from_python(object.ptr(), &d) != 0) return PyErr_Clear(), false;
  if (!d.strides || !dtype_of(d, t.dtype) || d.ndim > kMaxDims || (on_cpu && d.device[0] != kCpu)) return false;
  t.ndim = d.ndim;
  for (int i = 0; i < d.ndim; ++i) t.sizes[i] = d.shape[i], t.strides[i] = d.strides[i];
  t.data = d.data ? static_cast<char*>(d.data) + d.byte_offset : &nothing;
  return true;
}

}  // namespace

Tensor tensor_from_python(py::handle object) {
  Tensor t;
  if (object.is_none() || from_dlpack(object, t, false)) return t;
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
  if (numel == 0 && !t.data) t.data = &nothing;
  return t;
}

bool read_plain_tensor(py::handle object, Tensor& t) {
  t = Tensor{};
  if (object.is_none()) return true;
  const PyTypeObject* type = Py_TYPE(object.ptr());
  return (type == type_of_tensors() || type == type_of_parameters()) && from_dlpack(object, t, true);
}

}  // namespace mxmoe
