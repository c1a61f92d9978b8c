#include <stdexcept>

#include "cuda/kernels/quantize.h"
#include "interpreter/launch.h"
#include "interpreter/machine.h"

namespace mxmoe::interpreter {
namespace {

namespace q = cuda::quantize;

template <class C>
std::vector<Site> launch(q::globals<Warp> g, const Tensor& x, const std::vector<Buffer>& buffers,
                         const Options& options) {
  g.x = tensor_map(x, C::kRows, C::kColumns * C::kElementBytes, cuda::Swizzle::kNone);
  const int64_t ctas = q::row_tiles(g.groups) * ceil_div(g.length, C::kColumns);
  Grid grid("quantize", options, static_cast<int>(ctas), C::kWarps, sizeof(q::shared<C>), buffers);
  grid.run([&](Warp& m) { q::kernel<C>(m, g); });
  return grid.sites();
}

template <typename E, typename... Args>
std::vector<Site> launch_input(DType dtype, Args&&... args) {
  if (dtype == DType::kF32) return launch<q::config<E, q::Input::kF32>>(args...);
  return dtype == DType::kBF16 ? launch<q::config<E, q::Input::kBF16>>(args...)
                               : launch<q::config<E, q::Input::kF16>>(args...);
}

}  // namespace

std::vector<Site> quantize(const Tensor& x, const Tensor& offs, const std::string& format, bool floor, bool blocked,
                           const QuantizeCopy& row, const QuantizeCopy& column, const Options& options) {
  q::globals<Warp> g{};
  const int64_t groups = offs ? offs.sizes[0] : x.sizes[0];
  g.groups = {offs.ptr<int32_t>(), static_cast<int>(groups), static_cast<int>(x.sizes[1]), x.sizes[0] * x.sizes[1]};
  g.length = x.sizes[2];
  g.row = {row.values.ptr<uint8_t>(), row.scales.ptr<uint8_t>()};
  g.column = {column.values.ptr<uint8_t>(), column.scales.ptr<uint8_t>()};
  g.blocked = blocked, g.floor = floor;
  const std::vector<Buffer> buffers = {buffer("x", x, false),
                                       buffer("offs", offs, false),
                                       buffer("row values", row.values, true),
                                       buffer("row scales", row.scales, true),
                                       buffer("column values", column.values, true),
                                       buffer("column scales", column.scales, true)};
  if (format == "mxfp8") return launch_input<E4M3>(x.dtype, g, x, buffers, options);
  if (format == "mxfp8_e5m2") return launch_input<E5M2>(x.dtype, g, x, buffers, options);
  throw std::invalid_argument("no kernel quantizes to " + format);
}

}  // namespace mxmoe::interpreter
