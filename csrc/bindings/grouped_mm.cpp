// grouped_mm and grouped_mm_wgrad: from tensors and offsets to the groups of one GemmProblem.
#include "host/grouped_mm.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/operand.h"
#include "bindings/tensor_caster.h"
#include "bindings/verbs.h"
#include "host/threads.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace py = pybind11;

namespace mxmoe {
namespace {

int64_t l2_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return 1 << 20;
}

void zero_rows(const Tensor& out, int64_t first, int threads) {
  const int64_t row_bytes = out.sizes[1] * size_of(out.dtype), stride = out.strides[0] * size_of(out.dtype);
  const int64_t rows = out.sizes[0] - first, chunk = 64;
  host::parallel(threads, (rows + chunk - 1) / chunk, [&](int64_t task, int) {
    for (int64_t r = first + task * chunk; r < std::min(first + (task + 1) * chunk, out.sizes[0]); ++r)
      std::memset(out.ptr<uint8_t>() + r * stride, 0, row_bytes);
  });
}

void run(host::GemmProblem problem, std::vector<host::GemmGroup>& groups, const std::string& isa) {
  problem.groups = groups.data(), problem.num_groups = static_cast<int64_t>(groups.size());
  if (!MXMOE_DISPATCH(isa, few_rows_gemm)(problem)) MXMOE_DISPATCH(isa, grouped_gemm)(problem);
}

void grouped_mm_wgrad(Tensor a_values, Tensor a_scales, Tensor a_global, const std::string& a_format, Tensor b_values,
                      Tensor b_scales, Tensor b_global, const std::string& b_format, Tensor offs, bool padded,
                      bool accumulate, Tensor out, const std::string& isa_name, int threads) {
  const std::string isa = host::resolve_isa(isa_name);
  const Operand a(a_values, a_scales, Tensor{}, a_format), b(b_values, b_scales, Tensor{}, b_format);
  py::gil_scoped_release release;
  const int32_t* ends = offs.ptr<int32_t>();
  std::vector<host::GemmGroup> groups;
  int64_t end = 0, start = 0;  // of the group's tokens; where its contraction starts
  for (int64_t e = 0; e < offs.sizes[0]; ++e) {
    const int64_t tokens = ends[e] - end;
    end = ends[e];
    host::GemmGroup g{a.lines(0, 0, start), b.lines(0, 0, start), nullptr, nullptr, out.sizes[1], tokens};
    start += padded ? (tokens + 127) / 128 * 128 : tokens;
    if (a_global) g.a.global = a_global.ptr<float>() + e * a_global.strides[0];
    if (b_global) g.b.global = b_global.ptr<float>() + e * b_global.strides[0];
    g.out = out.ptr<uint8_t>() + e * out.strides[0] * size_of(out.dtype);
    if (tokens > 0 || !accumulate) groups.push_back(g);
  }
  run({a.format(), b.format(), nullptr, 0, out.sizes[2], out.strides[1], out.dtype, accumulate, l2_bytes(), threads},
      groups, isa);
}

}  // namespace

void multiply_groups(const Operand& a, const Operand& b, const Tensor& offs, const Tensor& bias, const Tensor& out,
                     const std::string& isa, int threads) {
  const int64_t contraction = std::min(a.contraction(), b.contraction()), num_experts = offs.sizes[0];
  const int32_t* ends = offs.ptr<int32_t>();
  std::vector<host::GemmGroup> groups;
  int64_t row = 0;
  for (int64_t e = 0; e < num_experts; row = ends[e++]) {
    if (ends[e] <= row) continue;
    host::GemmGroup g{a.lines(0, row, 0), b.lines(e, 0, 0), nullptr, nullptr, ends[e] - row, contraction};
    g.out = out.ptr<uint8_t>() + row * out.strides[0] * size_of(out.dtype);
    if (bias) g.bias = bias.ptr<float>() + e * bias.strides[0];
    groups.push_back(g);
  }
  run({a.format(), b.format(), nullptr, 0, out.sizes[1], out.strides[0], out.dtype, false, l2_bytes(), threads}, groups,
      isa);
  zero_rows(out, row, threads);
}

namespace {

void grouped_mm(Tensor a_values, Tensor a_scales, Tensor a_global, const std::string& a_format, Tensor b_values,
                Tensor b_scales, Tensor b_global, const std::string& b_format, Tensor offs, Tensor bias, Tensor out,
                const std::string& isa_name, int threads) {
  const std::string isa = host::resolve_isa(isa_name);
  const Operand a(a_values, a_scales, a_global, a_format), b(b_values, b_scales, b_global, b_format);
  py::gil_scoped_release release;
  multiply_groups(a, b, offs, bias, out, isa, threads);
}

}  // namespace

void bind_grouped_mm(py::module_& m) {
  m.def("grouped_mm", &grouped_mm);
  m.def("grouped_mm_wgrad", &grouped_mm_wgrad);
}

}  // namespace mxmoe
