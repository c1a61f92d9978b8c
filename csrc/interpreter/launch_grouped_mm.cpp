#include <stdexcept>

#include "cuda/kernels/grouped_mm_sm100.h"
#include "interpreter/launch.h"
#include "interpreter/machine.h"

namespace mxmoe::interpreter {
namespace {

namespace mm = cuda::grouped_mm_sm100;

template <class C>
std::vector<Site> launch(mm::globals<Warp> g, const GemmOperand& a, const GemmOperand& b,
                         const std::vector<Buffer>& buffers, const Options& options) {
  g.a = tensor_map(a.values, C::kRows, C::kStepBytes, cuda::Swizzle::k128B);
  g.b = tensor_map(b.values, C::kColumns, C::kStepBytes, cuda::Swizzle::k128B);
  g.steps = static_cast<int>(ceil_div(static_cast<int64_t>(g.a.columns) * g.a.element_bytes, C::kStepBytes));
  Grid grid("grouped_mm", options, options.num_sms, C::kWarps, sizeof(mm::shared<C>), buffers);
  grid.run([&](Warp& m) { mm::kernel<C>(m, g); });
  return grid.sites();
}

template <mm::Operand kOperand, typename... Args>
std::vector<Site> launch_output(DType dtype, Args&&... args) {
  if (dtype == DType::kF32) return launch<mm::config<kOperand, mm::Output::kF32>>(args...);
  return dtype == DType::kBF16 ? launch<mm::config<kOperand, mm::Output::kBF16>>(args...)
                               : launch<mm::config<kOperand, mm::Output::kF16>>(args...);
}

bool is_mxfp8(const std::string& format) {
  return format == "mxfp8" || format == "mxfp8_e5m2";
}

}  // namespace

std::vector<Site> grouped_mm_sm100(const GemmOperand& a, const GemmOperand& b, const Tensor& offs, const Tensor& bias,
                                   const Tensor& out, const Options& options) {
  mm::globals<Warp> g{};
  const int experts = static_cast<int>(offs.sizes[0]);
  g.groups = {offs.ptr<int32_t>(), experts, 0, out.sizes[0]};
  g.a_scales = a.scales.ptr<uint8_t>(), g.b_scales = b.scales.ptr<uint8_t>();
  g.a_global = a.global.ptr<float>(), g.b_global = b.global.ptr<float>();
  g.bias = bias.ptr<float>();
  g.out = out.data, g.out_stride = out.strides[0];
  g.outputs = static_cast<int>(out.sizes[1]);
  g.a_element = a.format == "mxfp8_e5m2" || a.format == "bf16", g.b_element = b.format == "mxfp8_e5m2";
  const int64_t bytes = a.values.sizes[1];
  g.scale_tiles = static_cast<int>(a.format == "nvfp4" ? ceil_div(bytes, 32) : ceil_div(bytes, 128));
  const std::vector<Buffer> buffers = {
      buffer("a", a.values, false), buffer("a scales", a.scales, false), buffer("a global", a.global, false),
      buffer("b", b.values, false), buffer("b scales", b.scales, false), buffer("b global", b.global, false),
      buffer("offs", offs, false),  buffer("bias", bias, false),         buffer("out", out, true)};
  if (is_mxfp8(a.format) && is_mxfp8(b.format))
    return launch_output<mm::Operand::kMxfp8>(out.dtype, g, a, b, buffers, options);
  if (a.format == "nvfp4" && b.format == "nvfp4")
    return launch_output<mm::Operand::kNvfp4>(out.dtype, g, a, b, buffers, options);
  if (a.format == b.format && (a.format == "bf16" || a.format == "fp16"))
    return launch_output<mm::Operand::kHalf>(out.dtype, g, a, b, buffers, options);
  throw std::invalid_argument("no kernel multiplies " + a.format + " by " + b.format);
}

}  // namespace mxmoe::interpreter
