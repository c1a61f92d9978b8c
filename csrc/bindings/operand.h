// An operand of a matrix product: from tensors and a format's name to the lines that the kernel reads.
#pragma once
#include <stdexcept>
#include <string>

#include "host/grouped_mm.h"
#include "tensor.h"

namespace mxmoe {

using host::Element;

inline Element element_of(const std::string& format) {
  static constexpr const char* kNames[] = {"fp32", "bf16", "fp16", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"};
  for (int i = 0; i < 7; ++i)
    if (format == kNames[i]) return static_cast<Element>(i);
  throw std::invalid_argument("unknown operand format " + format);
}

inline Element element_of(DType dtype) {
  return dtype == DType::kBF16 ? Element::kBF16 : dtype == DType::kF16 ? Element::kF16 : Element::kF32;
}

inline int64_t size_of(DType dtype) {
  static constexpr int64_t kBytes[] = {4, 2, 2, 1, 4, 8};  // by DType
  return kBytes[static_cast<int>(dtype)];
}

// An operand: (lines, contraction), or (groups, lines, contraction) where each group has lines of its own; in panels:
// (groups, panels, blocks of 32 elements, bytes), scales (groups, panels, block scales, 64).
struct Operand {
  Tensor values, scales, global;
  Element element;
  bool in_fp32;

  // Format "fp32" of 16-bit values: they are multiplied as what they are worth in FP32.
  Operand(Tensor v, Tensor s, Tensor g, const std::string& format)
      : values(v), scales(s), global(g), element(element_of(format)) {
    in_fp32 = element == Element::kF32 || element == Element::kF16;
    if (element == Element::kF32) element = element_of(v.dtype);
  }

  bool in_panels() const { return values.ndim == 4; }
  int line_dim() const { return in_panels() ? 1 : values.ndim - 2; }
  int64_t num_lines() const { return values.sizes[line_dim()] * (in_panels() ? kPanelLines : 1); }
  bool packed() const { return element == Element::kMxE2M1 || element == Element::kNvE2M1; }
  int64_t block() const { return element == Element::kNvE2M1 ? 16 : 32; }
  int64_t contraction() const { return values.sizes[line_dim() + 1] * (in_panels() ? kPanelBlock : packed() ? 2 : 1); }

  host::LineFormat format() const {
    const int64_t bytes = size_of(values.dtype), line = values.strides[line_dim()], k = values.strides[line_dim() + 1];
    const int64_t scale = scales ? scales.strides[line_dim()] : 0;
    const int64_t global_stride = global && global.ndim > line_dim() ? global.strides[line_dim()] : 0;
    if (in_panels()) return {element, in_fp32, false, true, line / kPanelLines, 1, scale / kPanelLines, global_stride};
    return {element, in_fp32, k != 1 && line == 1, false, line * bytes, k * bytes, scale, global_stride};
  }

  // The lines of `group` (0 where all groups share them) from `line` on, at element k of the contraction.
  host::Lines lines(int64_t group, int64_t line, int64_t k) const {
    const host::LineFormat f = format();
    const bool stacked = values.ndim >= 3;
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

// out[r] = a[r] . b[e]^T (+ bias[e]) for the rows of group e; rows past the last group are zero.
void multiply_groups(const Operand& a, const Operand& b, const Tensor& offs, const Tensor& bias, const Tensor& out,
                     const std::string& isa, int threads);

}  // namespace mxmoe
