// moe_decode: the experts of a few tokens in one call, so that the time is that of reading their weights.
#include <cstdint>
#include <optional>
#include <string>

#include "bindings/copies.h"
#include "bindings/operand.h"
#include "bindings/tensor_caster.h"
#include "bindings/verbs.h"
#include "host/memory.h"
#include "host/route.h"
#include "host/rows.h"

namespace py = pybind11;

namespace mxmoe {
namespace {

// Dense matrices, one after the other; first sized, then placed in one block.
class Arena {
 public:
  explicit Arena(int64_t bytes) : block_(bytes), next_(static_cast<uint8_t*>(block_.data())) {}

  Tensor matrix(DType dtype, int64_t rows, int64_t cols, int64_t bytes) {
    Tensor t{next_, dtype, 2, {rows, cols}, {cols, 1}};
    next_ += (rows * cols * bytes + 63) / 64 * 64;
    return t;
  }
  Tensor vector(DType dtype, int64_t length, int64_t bytes) {
    Tensor t = matrix(dtype, 1, length, bytes);
    return {t.data, dtype, 1, {length}, {1}};
  }

 private:
  host::Block block_;
  uint8_t* next_;
};

// Rows as the products read them: themselves, or their row copy in a block format (global scales per row).
Operand activation(const Tensor& rows, const std::string& format, const Tensor& offs, Arena& arena,
                   const std::string& isa, int threads) {
  static constexpr const char* kHighPrecision[] = {"fp32", "bf16", "fp16"};  // by DType
  for (const char* name : kHighPrecision)
    if (format == name) return {rows, {}, {}, kHighPrecision[static_cast<int>(rows.dtype)]};
  const Format f = format_of(format);
  const int64_t num_rows = rows.sizes[0], length = rows.sizes[1], block = block_of(f);
  const Tensor values = arena.matrix(DType::kU8, num_rows, (length * bits_of_element(f) + 7) / 8, 1);
  const Tensor scales = arena.matrix(DType::kU8, num_rows, (length + block - 1) / block, 1);
  const Tensor global = f == Format::kNvfp4 ? arena.vector(DType::kF32, num_rows, 4) : Tensor{};
  const Tensor x{rows.data, rows.dtype, 3, {1, num_rows, length}, {num_rows * length, length, 1}};
  const CopiesArgs copies(x, offs, f, false, copy_of(values, scales, global), {});
  MXMOE_DISPATCH(isa, quantize)(copies.args, threads);
  return {values, scales, global, format};
}

struct Decode {
  Tensor x, ids, weights;
  Operand up;
  Tensor up_bias;
  Operand down;
  Tensor down_bias;
  host::Activation swiglu;
  bool interleaved;
  std::string act_format;
  Tensor out;

  void run(const std::string& isa, int threads) const;
};

void Decode::run(const std::string& isa, int threads) const {
  const int64_t top_k = ids.sizes[1], num_rows = ids.sizes[0] * top_k, experts = up.values.sizes[0];
  const int64_t hidden = up.num_lines(), dim = x.sizes[1];
  const DType dtype = act_format == "fp32" ? DType::kF32 : DType::kBF16;
  // x's rows, hidden rows, activations and results, each at most twice (quantized), at 4 bytes a value; indices.
  Arena arena(8 * num_rows * (2 * dim + 2 * hidden + 64) + 16 * (num_rows + experts) + 4096);

  const Tensor experts_TK = arena.matrix(DType::kI32, ids.sizes[0], top_k, 4);
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t id = ids.dtype == DType::kI64 ? ids.ptr<int64_t>()[i] : ids.ptr<int32_t>()[i];
    experts_TK.ptr<int32_t>()[i] = id < 0 || id >= experts ? -1 : static_cast<int32_t>(id);
  }
  const Tensor counts = arena.vector(DType::kI32, experts, 4), offs = arena.vector(DType::kI32, experts, 4);
  const Tensor permutation = arena.vector(DType::kI32, num_rows, 4);
  const Tensor inverse = arena.matrix(DType::kI32, ids.sizes[0], top_k, 4);
  host::sort_by_expert(experts_TK.ptr<int32_t>(), num_rows, experts, counts.ptr<int32_t>(), offs.ptr<int32_t>(),
                       permutation.ptr<int32_t>(), inverse.ptr<int32_t>(), threads);

  const Tensor rows = arena.matrix(x.dtype, num_rows, dim, size_of(x.dtype));
  MXMOE_DISPATCH(isa, permute)(x, permutation, top_k, rows, nullptr, threads);
  const Tensor h = arena.matrix(dtype, num_rows, hidden, size_of(dtype));
  multiply_groups(activation(rows, act_format, offs, arena, isa, threads), up, offs, up_bias, h, isa, threads);
  const Tensor a = arena.matrix(dtype, num_rows, hidden / 2, size_of(dtype));
  MXMOE_DISPATCH(isa, swiglu)(h, offs, swiglu, interleaved, a, nullptr, threads);
  const Tensor y = arena.matrix(dtype, num_rows, out.sizes[1], size_of(dtype));
  multiply_groups(activation(a, act_format, offs, arena, isa, threads), down, offs, down_bias, y, isa, threads);
  MXMOE_DISPATCH(isa, unpermute)(y, inverse, weights, out, threads);
}

host::Activation swiglu_of(float alpha, std::optional<float> limit, float offset) {
  return {alpha, limit.value_or(0.0f), offset, limit.has_value()};
}

void moe_decode(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor s13, Tensor g13, const std::string& f13,
                Tensor b13, Tensor w2, Tensor s2, Tensor g2, const std::string& f2, Tensor b2, float alpha,
                std::optional<float> limit, float offset, bool interleaved, const std::string& act_format, Tensor out,
                const std::string& isa, int threads) {
  const Decode decode{x,           ids,
                      weights,     {w13, s13, g13, f13},
                      b13,         {w2, s2, g2, f2},
                      b2,          swiglu_of(alpha, limit, offset),
                      interleaved, act_format,
                      out};
  py::gil_scoped_release release;
  decode.run(host::resolve_isa(isa), threads);
}

// moe_decode for arguments that look like those of a call that was checked: dtypes, sizes, strides and formats. Reading
// one token's experts takes a fraction of a millisecond, and then evicts the interpreter from the caches: checking once
// more, through torch's dispatcher, would take as long as a tenth of it.
class CheckedDecode {
 public:
  // Throws where they cannot be told apart from others by these properties.
  CheckedDecode(py::handle x, py::handle ids, py::handle weights, py::handle w13, py::handle b13, py::handle w2,
                py::handle b2, py::handle out, const std::string& f13, const std::string& f2, float alpha,
                std::optional<float> limit, float offset, bool interleaved, std::string act_format)
      : up_format_(f13),
        down_format_(f2),
        swiglu_(swiglu_of(alpha, limit, offset)),
        interleaved_(interleaved),
        act_format_(std::move(act_format)) {
    if (!read({x, ids, weights, b13, b2, out}, w13, w2, checked_)) throw py::value_error("not plain tensors");
    for (const Tensor& t : checked_.tensors)
      if (!dense(t)) throw py::value_error("not dense");
  }

  // False, with nothing done, for any other arguments.
  bool run(py::handle x, py::handle ids, py::handle weights, py::handle w13, py::handle b13, py::handle w2,
           py::handle b2, py::handle out, const std::string& isa, int threads) const {
    Arguments now;
    if (!read({x, ids, weights, b13, b2, out}, w13, w2, now) || !alike(now)) return false;
    const Tensor* t = now.tensors;
    const Decode decode{t[0],         t[1],
                        t[2],         {t[6], t[7], t[8], up_format_},
                        t[3],         {t[9], t[10], t[11], down_format_},
                        t[4],         swiglu_,
                        interleaved_, act_format_,
                        t[5]};
    py::gil_scoped_release release;
    decode.run(host::resolve_isa(isa), threads);
    return true;
  }

 private:
  static constexpr int kTensors = 12, kOut = 5;
  struct Arguments {
    Tensor tensors[kTensors];  // x, ids, weights, b13, b2, out, then values, scales and global scale of w13 and of w2
    py::object properties[6];  // format, axis and scale layout of w13 and of w2 where they are MXTensors
  };

  static bool read(std::initializer_list<py::handle> plain, py::handle w13, py::handle w2, Arguments& to) {
    int n = 0;
    for (py::handle object : plain)
      if (!read_plain_tensor(object, to.tensors[n++])) return false;
    for (int i = 0; i < 2; ++i, n += 3) {
      const py::handle w = i == 0 ? w13 : w2;
      if (read_plain_tensor(w, to.tensors[n])) continue;
      static constexpr const char* kParts[] = {"values", "scales", "global_scale"};
      static constexpr const char* kProperties[] = {"format", "axis", "scale_layout"};
      for (int j = 0; j < 3; ++j) {
        const auto part = py::reinterpret_steal<py::object>(PyObject_GetAttrString(w.ptr(), kParts[j]));
        auto property = py::reinterpret_steal<py::object>(PyObject_GetAttrString(w.ptr(), kProperties[j]));
        if (!part || !property) return PyErr_Clear(), false;
        if (!read_plain_tensor(part, to.tensors[n + j])) return false;  // the MXTensor keeps it alive
        to.properties[3 * i + j] = std::move(property);
      }
    }
    return true;
  }

  static bool dense(const Tensor& t) {
    int64_t stride = 1;
    for (int i = t.ndim - 1; i >= 0; stride *= t.sizes[i--])
      if (t.sizes[i] != 1 && t.strides[i] != stride) return false;
    return true;
  }

  static int64_t bytes(const Tensor& t) {
    int64_t n = size_of(t.dtype);
    for (int i = 0; i < t.ndim; ++i) n *= t.sizes[i];
    return n;
  }

  bool alike(const Arguments& now) const {
    const auto* out = now.tensors[kOut].ptr<uint8_t>();
    for (int i = 0; i < kTensors; ++i) {
      const Tensor &a = checked_.tensors[i], &b = now.tensors[i];
      if (bool(a) != bool(b) || a.dtype != b.dtype || a.ndim != b.ndim || a.sizes != b.sizes || a.strides != b.strides)
        return false;
      if (i != kOut && b && b.ptr<uint8_t>() < out + bytes(now.tensors[kOut]) && out < b.ptr<uint8_t>() + bytes(b))
        return false;
    }
    for (int i = 0; i < 6; ++i) {
      PyObject *a = checked_.properties[i].ptr(), *b = now.properties[i].ptr();
      if (a != b && (!a || !b || PyObject_RichCompareBool(a, b, Py_EQ) != 1)) return PyErr_Clear(), false;
    }
    return true;
  }

  Arguments checked_;
  const std::string up_format_, down_format_;
  const host::Activation swiglu_;
  const bool interleaved_;
  const std::string act_format_;
};

}  // namespace

void bind_moe_decode(py::module_& m) {
  m.def("moe_decode", &moe_decode);
  using H = py::handle;
  py::class_<CheckedDecode>(m, "CheckedDecode")
      .def(py::init<H, H, H, H, H, H, H, H, const std::string&, const std::string&, float, std::optional<float>, float,
                    bool, std::string>())
      .def("__call__", &CheckedDecode::run);
}

}  // namespace mxmoe
