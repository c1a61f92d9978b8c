// One function per verb family: adds its bindings to the module.
#pragma once
#include <pybind11/pybind11.h>

namespace mxmoe {
void bind_quantize(pybind11::module_& m);
void bind_grouped_mm(pybind11::module_& m);
void bind_moe_decode(pybind11::module_& m);
void bind_route(pybind11::module_& m);
void bind_memory(pybind11::module_& m);
void bind_rows(pybind11::module_& m);  // permute, unpermute, swiglu and their backward forms
void bind_delta(pybind11::module_& m);
void bind_ceilings(pybind11::module_& m);  // probes, not verbs
}  // namespace mxmoe
