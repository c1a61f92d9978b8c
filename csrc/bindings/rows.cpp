#include "bindings/verbs.h"

#include "bindings/tensor_caster.h"

namespace mxmoe {

void bind_rows(pybind11::module_&) {}

}  // namespace mxmoe
