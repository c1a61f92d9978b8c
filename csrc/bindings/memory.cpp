// Bindings of the kept memory: a Block has the buffer protocol, so that torch can lay a tensor on it.
#include "host/memory.h"

#include "bindings/verbs.h"

namespace py = pybind11;

namespace mxmoe {

void bind_memory(py::module_& m) {
  py::class_<host::Block>(m, "Block", py::buffer_protocol()).def(py::init<int64_t>()).def_buffer([](host::Block& b) {
    return py::buffer_info(static_cast<uint8_t*>(b.data()), b.size());
  });
  m.def("memory_stats", [] {
    const host::MemoryStats s = host::memory_stats();
    return py::make_tuple(s.in_use, s.kept, s.peak);
  });
  m.def("release_kept_memory", host::release_kept_memory);
}

}  // namespace mxmoe
