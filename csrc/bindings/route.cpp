// Bindings of route, route_backward and sort_by_expert: arguments as in mxmoe/backends/__init__.py, then (isa,
// threads).
#include "host/route.h"

#include "bindings/tensor_caster.h"
#include "bindings/verbs.h"

namespace py = pybind11;

namespace mxmoe {
namespace {

void route(Tensor logits, Tensor bias, Tensor replay, int64_t top_k, const std::string& score, int64_t num_groups,
           int64_t groups_kept, bool normalize, float scale, std::optional<float> replay_threshold, Tensor ids,
           Tensor weights, Tensor probs, Tensor z, const std::string& isa, int threads) {
  host::RouteArgs args{.logits = logits.ptr<float>(),
                       .bias = bias.ptr<float>(),
                       .replay = replay.ptr<int32_t>(),
                       .num_tokens = logits.sizes[0],
                       .num_experts = logits.sizes[1],
                       .top_k = top_k,
                       .sigmoid = score == "sigmoid",
                       .num_groups = num_groups,
                       .groups_kept = groups_kept,
                       .normalize = normalize,
                       .scale = scale,
                       .filter_replay = replay_threshold.has_value(),
                       .replay_threshold = replay_threshold.value_or(0.0f),
                       .ids = ids.ptr<int32_t>(),
                       .weights = weights.ptr<float>(),
                       .probs = probs.ptr<float>(),
                       .z = z.ptr<float>()};
  const std::string resolved = host::resolve_isa(isa);
  py::gil_scoped_release release;
  MXMOE_DISPATCH(resolved, route)(args, threads);
}

void route_backward(Tensor logits, Tensor ids, Tensor weights_grad, Tensor probs_grad, Tensor z_grad,
                    const std::string& score, bool normalize, float scale, Tensor logits_grad, const std::string& isa,
                    int threads) {
  host::RouteBackwardArgs args{.logits = logits.ptr<float>(),
                               .ids = ids.ptr<int32_t>(),
                               .weights_grad = weights_grad.ptr<float>(),
                               .probs_grad = probs_grad.ptr<float>(),
                               .z_grad = z_grad.ptr<float>(),
                               .num_tokens = logits.sizes[0],
                               .num_experts = logits.sizes[1],
                               .top_k = ids.sizes[1],
                               .sigmoid = score == "sigmoid",
                               .normalize = normalize,
                               .scale = scale,
                               .logits_grad = logits_grad.ptr<float>()};
  const std::string resolved = host::resolve_isa(isa);
  py::gil_scoped_release release;
  MXMOE_DISPATCH(resolved, route_backward)(args, threads);
}

void sort_by_expert(Tensor ids, int64_t num_experts, Tensor counts, Tensor offs, Tensor permutation, Tensor inverse,
                    const std::string&, int threads) {
  py::gil_scoped_release release;
  host::sort_by_expert(ids.ptr<int32_t>(), permutation.sizes[0], num_experts, counts.ptr<int32_t>(),
                       offs.ptr<int32_t>(), permutation.ptr<int32_t>(), inverse.ptr<int32_t>(), threads);
}

}  // namespace

void bind_route(py::module_& m) {
  m.def("route", &route);
  m.def("route_backward", &route_backward);
  m.def("sort_by_expert", &sort_by_expert);
}

}  // namespace mxmoe
