// quantize, dequantize, swizzle_scales, decode_int4: from tensors and option names to the kernels' arguments.
#include "host/quantize.h"

#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/copies.h"
#include "bindings/tensor_caster.h"
#include "bindings/verbs.h"
#include "host/dequantize.h"
#include "host/int4.h"
#include "host/isa.h"
#include "host/swizzle_scales.h"
#include "layout.h"

namespace py = pybind11;

namespace mxmoe {
namespace {

Scope scope_of(const std::string& name) {
  if (name == "row") return Scope::kRow;
  if (name == "tensor") return Scope::kTensor;
  if (name == "group") return Scope::kGroup;
  throw std::invalid_argument("unknown scope " + name);
}

void quantize(const Tensor& x, const Tensor& offs, const std::string& format, bool floor, const std::string& scope,
              std::optional<uint64_t> seed, bool hadamard, bool four_six, bool block_2d, const Tensor& row_values,
              const Tensor& row_scales, const Tensor& row_global, const Tensor& column_values,
              const Tensor& column_scales, const Tensor& column_global, const std::string& isa_name, int threads) {
  const std::string isa = host::resolve_isa(isa_name);
  py::gil_scoped_release unlocked;
  CopiesArgs copies(x, offs, format_of(format), floor, copy_of(row_values, row_scales, row_global),
                    copy_of(column_values, column_scales, column_global));
  host::QuantizeArgs& args = copies.args;
  args.scope = scope_of(scope), args.hadamard = hadamard, args.four_six = four_six, args.block_2d = block_2d;
  args.stochastic = seed.has_value(), args.seed = seed.value_or(0);
  if (args.scope == Scope::kTensor) args.num_segments = 1;
  MXMOE_DISPATCH(isa, quantize)(args, threads);
}

void dequantize(const Tensor& values, const Tensor& scales, const Tensor& global_scale, const Tensor& offs,
                const std::string& format, bool column, const std::string& scope, const Tensor& out,
                const std::string& isa_name, int threads) {
  const std::string isa = host::resolve_isa(isa_name);
  py::gil_scoped_release unlocked;
  const int64_t num_groups = offs ? offs.sizes[0] : out.sizes[0];
  const auto tiles = host::row_tiles(out.sizes[0], out.sizes[1], offs.ptr<int32_t>(), num_groups, column ? 128 : 32);
  host::DequantizeArgs args{};
  args.values = values.ptr<uint8_t>(), args.scales = scales.ptr<uint8_t>();
  args.global_scale = global_scale.ptr<float>();
  args.out = out;
  args.format = format_of(format), args.scope = scope_of(scope), args.column = column;
  args.tiles = tiles.data(), args.num_tiles = static_cast<int64_t>(tiles.size());
  args.padded_rows = offs ? padded_rows(out.sizes[1], num_groups) : out.sizes[1];
  MXMOE_DISPATCH(isa, dequantize)(args, threads);
}

void swizzle_scales(const Tensor& plain, const Tensor& blocked, const Tensor& offs, bool column, int64_t block,
                    bool inverse, const std::string&, int threads) {  // bytes move the same way on every ISA
  py::gil_scoped_release unlocked;
  host::swizzle_scales({plain.ptr<uint8_t>(), blocked.ptr<uint8_t>(), plain.sizes[0], plain.sizes[1], plain.sizes[2],
                        blocked.sizes[1], offs.ptr<int32_t>(), offs ? offs.sizes[0] : 0, column, block, inverse},
                       threads);
}

void decode_int4(const Tensor& packed, const Tensor& scale, const Tensor& out, const std::string& isa_name,
                 int threads) {
  const std::string isa = host::resolve_isa(isa_name);
  py::gil_scoped_release unlocked;
  MXMOE_DISPATCH(isa, decode_int4)({packed.ptr<uint8_t>(), scale, out}, threads);
}

}  // namespace

void bind_quantize(py::module_& m) {
  m.def("quantize", &quantize);
  m.def("dequantize", &dequantize);
  m.def("swizzle_scales", &swizzle_scales);
  m.def("decode_int4", &decode_int4);
}

}  // namespace mxmoe
