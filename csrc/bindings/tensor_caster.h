// pybind11 caster: any torch.Tensor on the CPU -> mxmoe::Tensor, by its Python attributes (no torch headers); None ->
// empty.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "tensor.h"

namespace mxmoe {
Tensor tensor_from_python(pybind11::handle object);  // throws pybind11::type_error naming an unknown dtype

// A torch.Tensor or Parameter itself (no subclass that means something else by it) in the CPU's memory, or None;
// without calls into Python. False for all others, and where torch does not offer it.
bool read_plain_tensor(pybind11::handle object, Tensor& t);
}  // namespace mxmoe

namespace pybind11::detail {
template <>
struct type_caster<mxmoe::Tensor> {
  PYBIND11_TYPE_CASTER(mxmoe::Tensor, const_name("torch.Tensor | None"));
  bool load(handle source, bool) {
    value = mxmoe::tensor_from_python(source);
    return true;
  }
};
}  // namespace pybind11::detail
