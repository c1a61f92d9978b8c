#include "bindings/verbs.h"

#include "bindings/tensor_caster.h"

namespace mxmoe {

void bind_quantize(pybind11::module_&) {}

}  // namespace mxmoe
