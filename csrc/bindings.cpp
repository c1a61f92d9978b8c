// The Python module mxmoe._C. Each verb's binding is in bindings/<verb>.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/verbs.h"
#include "host/isa.h"
#include "host/threads.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "mxmoe's compiled core: the host backend";
  m.def("isas", &mxmoe::host::available_isas, "Instruction sets built in and supported by this CPU, best last.");
  m.def("default_isa", &mxmoe::host::default_isa);
  m.def("release_workspaces", &mxmoe::host::release_workspaces, "Free the calling thread's kept workspaces.");
  m.def("thread_pool_size", &mxmoe::host::pool_size, "Worker threads parked in this process's pool.");
  mxmoe::bind_quantize(m);
  mxmoe::bind_grouped_mm(m);
  mxmoe::bind_moe_decode(m);
  mxmoe::bind_route(m);
  mxmoe::bind_rows(m);
  mxmoe::bind_memory(m);
  mxmoe::bind_delta(m);
  mxmoe::bind_ceilings(m);
}
