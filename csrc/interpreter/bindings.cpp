// The Python module mxmoe._interp. Every function ends with the options of the run: seed, CTAs at a time, and the
// mutant (call site, kind) or empty strings, and None or the Program to which the launch is added instead; it returns
// the call sites that ran as (label, instruction, calls, kinds of mutants that make a difference only at some sites).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/tensor_caster.h"
#include "cuda/tile/descriptors.h"
#include "cuda/verbs.h"
#include "interpreter/launcher.h"

namespace py = pybind11;

namespace mxmoe::interpreter {
namespace {

using SiteList = std::vector<std::tuple<std::string, std::string, int64_t, std::vector<const char*>>>;

SiteList list_of(const std::vector<Site>& sites) {
  SiteList list;
  for (const Site& s : sites) list.emplace_back(s.label, s.op, s.calls, s.kinds);
  return list;
}

// Ctrl-C ends a kernel.
void raise_signals() {
  py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals()) throw py::error_already_set();
}

// A verb as Python calls it.
template <typename... Args>
auto bound(void (*verb)(Launcher&, Args...)) {
  return [verb](std::remove_cvref_t<Args>... args, uint64_t seed, int num_sms, const std::string& site,
                const std::string& mutant, Program* program) {
    py::gil_scoped_release release;
    Launcher launcher{{seed, num_sms, site, mutant, raise_signals}, program, {}};
    verb(launcher, args...);
    return list_of(launcher.sites);
  };
}

SiteList run_program(const Program& program, uint64_t seed, int num_sms, const std::string& site,
                     const std::string& mutant) {
  py::gil_scoped_release release;
  Launcher launcher{{seed, num_sms, site, mutant, raise_signals}, nullptr, {}};
  launcher.run_all(program.launches);
  return list_of(launcher.sites);
}

}  // namespace
}  // namespace mxmoe::interpreter

PYBIND11_MODULE(_interp, m) {
  namespace i = mxmoe::interpreter;
  m.doc() = "mxmoe's GPU kernels, run on the CPU by an interpreter that checks them";
  py::register_exception<i::KernelError>(m, "KernelError", PyExc_RuntimeError);
  py::class_<i::Program>(m, "Program")
      .def(py::init<>())
      .def_readwrite("device", &i::Program::device)
      .def_readwrite("after", &i::Program::after)
      .def_property_readonly("num_launches", [](const i::Program& p) { return p.launches.size(); })
      .def("run", &i::run_program);
  m.def("quantize", i::bound(&mxmoe::cuda::run_quantize<i::Launcher>));
  m.def("quantize_nvfp4", i::bound(&mxmoe::cuda::run_quantize_nvfp4<i::Launcher>));
  m.def("quantize_blocks", i::bound(&mxmoe::cuda::run_quantize_blocks<i::Launcher>));
  m.def("dequantize", i::bound(&mxmoe::cuda::run_dequantize<i::Launcher>));
  m.def("swizzle_scales", i::bound(&mxmoe::cuda::run_swizzle_scales<i::Launcher>));
  m.def("grouped_mm_fp32", i::bound(&mxmoe::cuda::run_grouped_mm_fp32<i::Launcher>));
  m.def("grouped_mm_wgrad_fp32", i::bound(&mxmoe::cuda::run_grouped_mm_wgrad_fp32<i::Launcher>));
  m.def("grouped_mm_sm90", i::bound(&mxmoe::cuda::run_grouped_mm_sm90<i::Launcher>));
  m.def("grouped_mm_sm100", i::bound(&mxmoe::cuda::run_grouped_mm_sm100<i::Launcher>));
  m.def("grouped_mm_wgrad_sm100", i::bound(&mxmoe::cuda::run_grouped_mm_wgrad_sm100<i::Launcher>));
  m.def("grouped_mm_wgrad_sm90", i::bound(&mxmoe::cuda::run_grouped_mm_wgrad_sm90<i::Launcher>));
  m.def("permute", i::bound(&mxmoe::cuda::run_permute<i::Launcher>));
  m.def("unpermute", i::bound(&mxmoe::cuda::run_unpermute<i::Launcher>));
  m.def("unpermute_backward", i::bound(&mxmoe::cuda::run_unpermute_backward<i::Launcher>));
  m.def("weights_grad", i::bound(&mxmoe::cuda::run_weights_grad<i::Launcher>));
  m.def("swiglu", i::bound(&mxmoe::cuda::run_swiglu<i::Launcher>));
  m.def("swiglu_backward", i::bound(&mxmoe::cuda::run_swiglu_backward<i::Launcher>));
  m.def("exchange_schedule", i::bound(&mxmoe::cuda::run_exchange_schedule<i::Launcher>));
  m.def("dispatch", i::bound(&mxmoe::cuda::run_dispatch<i::Launcher>));
  m.def("combine", i::bound(&mxmoe::cuda::run_combine<i::Launcher>));
  m.def("cluster_copy", i::bound(&mxmoe::cuda::run_cluster_copy<i::Launcher>));
  m.def("ladder", i::bound(&mxmoe::cuda::run_ladder<i::Launcher>));
  m.def("route", i::bound(&mxmoe::cuda::run_route<i::Launcher>));
  m.def("route_backward", i::bound(&mxmoe::cuda::run_route_backward<i::Launcher>));
  m.def("sort_by_expert", i::bound(&mxmoe::cuda::run_sort_by_expert<i::Launcher>));
  m.def("moe_decode", i::bound(&mxmoe::cuda::run_moe_decode<i::Launcher>));

  // For tests of the encoders: descriptors as integers. swizzle: 0 none, 1 32, 2 64, 3 128 bytes.
  namespace c = mxmoe::cuda;
  const auto operand = [](uint32_t address, uint32_t leading, uint32_t stride, int swizzle) {
    return c::SharedOperand{address, leading, stride, static_cast<c::Swizzle>(swizzle)};
  };
  m.def("tcgen05_descriptor",
        [=](uint32_t a, uint32_t l, uint32_t s, int w) { return c::tcgen05_descriptor(operand(a, l, s, w)); });
  m.def("wgmma_descriptor",
        [=](uint32_t a, uint32_t l, uint32_t s, int w) { return c::wgmma_descriptor(operand(a, l, s, w)); });
  m.def("instruction_f16", [](int rows, int columns, bool a_mn, bool b_mn, bool bf16) {
    return c::instruction_descriptor_f16({rows, columns, a_mn, b_mn}, bf16);
  });
  m.def("instruction_mxf8f6f4", [](int rows, int columns, bool a_mn, bool b_mn, uint32_t a, uint32_t b, uint32_t id) {
    return c::instruction_descriptor_mxf8f6f4({rows, columns, a_mn, b_mn}, a, b, id);
  });
  m.def("instruction_mxf4nvf4",
        [](int rows, int columns) { return c::instruction_descriptor_mxf4nvf4({rows, columns}); });
}
