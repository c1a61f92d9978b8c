// grouped_mm and grouped_mm_wgrad: from tensors and offsets to the groups of one GemmProblem.
#include "host/grouped_mm.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/tensor_caster.h"
#include "bindings/verbs.h"
#include "host/threads.h"

#if defined(__linux__)
#include <unistd.h>
#endif

namespace py = pybind11;

namespace mxmoe {
namespace {

using host::Element;

Element element_of(const std::string& format) {
  static constexpr const char* kNames[] = {"fp32", "bf16", "fp16", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"};
  for (int i = 0; i < 7; ++i)
    if (format == kNames[i]) return static_cast<Element>(i);
  throw std::invalid_argument("unknown operand format " + format);
}

int64_t size_of(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kBF16 || dtype == DType::kF16 ? 2 : 1;
}

// An operand: (lines, contraction), or (groups, lines, contraction) where each group has lines of its own.
struct Operand {
  Tensor values, scales, global;
  Element element;

  Operand(Tensor v, Tensor s, Tensor g, const std::string& format)
      : values(v), scales(s), global(g), element(element_of(format)) {}

  int line_dim() const { return values.ndim - 2; }
  bool packed() const { return element == Element::kMxE2M1 || element == Element::kNvE2M1; }
  int64_t block() const { return element == Element::kNvE2M1 ? 16 : 32; }
  int64_t contraction() const { return values.sizes[line_dim() + 1] * (packed() ? 2 : 1); }

  host::LineFormat format() const {
    const int64_t bytes = size_of(values.dtype), line = values.strides[line_dim()], k = values.strides[line_dim() + 1];
    return {element,
            k != 1 && line == 1,
            line * bytes,
            k * bytes,
            scales ? scales.strides[line_dim()] : 0,
            global && global.ndim > line_dim() ? global.strides[line_dim()] : 0};
  }

  // The lines of `group` (0 where all groups share them) from `line` on, at element k of the contraction.
  host::Lines lines(int64_t group, int64_t line, int64_t k) const {
    const host::LineFormat f = format();
    const bool stacked = values.ndim == 3;
    int64_t offset = line * f.line_stride + (packed() ? k / 2 : k * f.k_stride);
    if (stacked) offset += group * values.strides[0] * size_of(values.dtype);
    host::Lines l{values.ptr<uint8_t>() + offset, nullptr, nullptr};
    if (scales)
      l.scales =
          scales.ptr<uint8_t>() + (stacked ? group * scales.strides[0] : 0) + line * f.scale_stride + k / block();
    if (global) l.global = global.ptr<float>() + (stacked ? group * global.strides[0] : 0) + line * f.global_stride;
    return l;
  }
};

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
  MXMOE_DISPATCH(isa, grouped_gemm)(problem);
}

void grouped_mm(Tensor a_values, Tensor a_scales, Tensor a_global, const std::string& a_format, Tensor b_values,
                Tensor b_scales, Tensor b_global, const std::string& b_format, Tensor offs, Tensor bias, Tensor out,
                const std::string& isa_name, int threads) {
  const std::string isa = host::resolve_isa(isa_name);
  const Operand a(a_values, a_scales, a_global, a_format), b(b_values, b_scales, b_global, b_format);
  py::gil_scoped_release release;
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

void bind_grouped_mm(py::module_& m) {
  m.def("grouped_mm", &grouped_mm);
  m.def("grouped_mm_wgrad", &grouped_mm_wgrad);
}

}  // namespace mxmoe
