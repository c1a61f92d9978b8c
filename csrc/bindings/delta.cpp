// Differences of two versions of a tensor. mxmoe/delta.py has checked shapes and sizes.
#include "host/delta.h"

#include <stdexcept>
#include <string>

#include "bindings/tensor_caster.h"
#include "bindings/verbs.h"

namespace py = pybind11;

namespace mxmoe {
namespace {

int64_t elements(const Tensor& t) {
  int64_t n = 1;
  for (int i = 0; i < t.ndim; ++i) n *= t.sizes[i];
  return n;
}

host::DeltaArgs args_of(const Tensor& t, const std::string& order) {
  host::DeltaArgs a{};
  a.numel = elements(t);
  a.width = t.dtype == DType::kU8 ? 1 : t.dtype == DType::kBF16 || t.dtype == DType::kF16 ? 2 : 4;
  if (t.dtype == DType::kI64) throw std::invalid_argument("a delta has elements of 1, 2 or 4 bytes, got int64");
  a.order = order == "plain"            ? host::DeltaOrder::kPlain
            : order == "sign_magnitude" ? host::DeltaOrder::kSignMagnitude
            : order == "nibbles"        ? host::DeltaOrder::kNibbles
                                        : throw std::invalid_argument("unknown order " + order);
  return a;
}

void planes(host::DeltaArgs& a, const Tensor& first_change, const Tensor& first_gap, const Tensor& gaps,
            const Tensor& steps) {
  a.first_change = first_change.ptr<int64_t>(), a.first_gap = first_gap.ptr<int64_t>();
  a.gaps = gaps.ptr<uint8_t>(), a.steps = steps.ptr<uint8_t>();
}

void count(const Tensor& before, const Tensor& after, const std::string& order, const Tensor& changes,
           const Tensor& gap_bytes, const std::string& isa_name, int threads) {
  const std::string isa = host::resolve_isa(isa_name);
  py::gil_scoped_release unlocked;
  host::DeltaArgs a = args_of(before, order);
  a.before = before.data, a.after = after.data;
  a.changes = changes.ptr<int32_t>(), a.gap_bytes = gap_bytes.ptr<int32_t>();
  MXMOE_DISPATCH(isa, delta_count)(a, threads);
}

void encode(const Tensor& before, const Tensor& after, const std::string& order, const Tensor& first_change,
            const Tensor& first_gap, const Tensor& gaps, const Tensor& steps, const std::string& isa_name,
            int threads) {
  const std::string isa = host::resolve_isa(isa_name);
  py::gil_scoped_release unlocked;
  host::DeltaArgs a = args_of(before, order);
  a.before = before.data, a.after = after.data;
  planes(a, first_change, first_gap, gaps, steps);
  MXMOE_DISPATCH(isa, delta_encode)(a, threads);
}

bool valid(const Tensor& target, const Tensor& first_change, const Tensor& first_gap, const Tensor& gaps,
           const std::string& isa_name, int threads) {
  const std::string isa = host::resolve_isa(isa_name);
  py::gil_scoped_release unlocked;
  host::DeltaArgs a = args_of(target, "plain");
  planes(a, first_change, first_gap, gaps, {});
  return MXMOE_DISPATCH(isa, delta_valid)(a, threads);
}

void apply(const Tensor& target, const std::string& order, const Tensor& first_change, const Tensor& first_gap,
           const Tensor& gaps, const Tensor& steps, bool backwards, const std::string& isa_name, int threads) {
  const std::string isa = host::resolve_isa(isa_name);
  py::gil_scoped_release unlocked;
  host::DeltaArgs a = args_of(target, order);
  a.target = target.data, a.backwards = backwards;
  planes(a, first_change, first_gap, gaps, steps);
  MXMOE_DISPATCH(isa, delta_apply)(a, threads);
}

}  // namespace

void bind_delta(py::module_& m) {
  m.attr("DELTA_CHUNK") = host::kDeltaChunk;
  m.def("delta_count", &count);
  m.def("delta_encode", &encode);
  m.def("delta_valid", &valid);
  m.def("delta_apply", &apply);
}

}  // namespace mxmoe
