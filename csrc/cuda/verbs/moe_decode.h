#pragma once
#include <stdexcept>

#include "cuda/kernels/moe_decode.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

template <class L>
void run_moe_decode(L& l, const Tensor& x, const Tensor& ids, const Tensor& weights, const std::string& format,
                    const Tensor& values, const Tensor& scales, const Tensor& global, const Tensor& bias,
                    bool interleaved, float alpha, std::optional<float> limit, float offset, bool down,
                    const Tensor& out) {
  const moe_decode::WeightTensors w{values, scales, global, bias};
  const swiglu::Activation activation{alpha, limit.value_or(0.0f), offset, limit.has_value()};
  const auto run = [&]<Weight kWeight>() {
    if (down) return moe_decode::launch<kWeight, true>(l, x, ids, weights, w, interleaved, activation, out);
    return moe_decode::launch<kWeight, false>(l, x, ids, weights, w, interleaved, activation, out);
  };
  if (format == "bf16") return run.template operator()<Weight::kBF16>();
  if (format == "mxfp8") return run.template operator()<Weight::kMxfp8>();
  if (format == "mxfp8_e5m2") return run.template operator()<Weight::kMxfp8E5m2>();
  if (format == "mxfp4") return run.template operator()<Weight::kMxfp4>();
  if (format == "nvfp4") return run.template operator()<Weight::kNvfp4>();
  throw std::invalid_argument("no kernel decodes with weights in " + format);
}

}  // namespace mxmoe::cuda
