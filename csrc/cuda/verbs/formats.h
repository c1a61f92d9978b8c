// What the verbs of GEMMs make of the names of their operands' formats.
#pragma once
#include <stdexcept>
#include <string>

namespace mxmoe::cuda {

// "mxfp8", "nvfp4", "bf16" or "fp16": what both operands are, MXFP8's elements aside.
inline std::string kind_of_both(const std::string& a, const std::string& b) {
  const auto kind = [](const std::string& format) { return format == "mxfp8_e5m2" ? "mxfp8" : format; };
  if (kind(a) != kind(b)) throw std::invalid_argument("no kernel multiplies " + a + " by " + b);
  return kind(a);
}

// 1 for E5M2 and BF16, 0 for E4M3 and FP16.
inline int element_of(const std::string& format) {
  return format == "mxfp8_e5m2" || format == "bf16";
}

[[noreturn]] inline void refuse(const std::string& format) {
  throw std::invalid_argument("no kernel multiplies " + format);
}

}  // namespace mxmoe::cuda
