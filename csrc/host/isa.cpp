#include "host/isa.h"

#include <algorithm>
#include <stdexcept>

namespace mxmoe::host {

std::vector<std::string> available_isas() {
  std::vector<std::string> names{"portable"};
#if defined(MXMOE_HAS_AVX512)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
      __builtin_cpu_supports("bmi2")) {
    names.push_back("avx2");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16") &&
        __builtin_cpu_supports("avx512vbmi"))
      names.push_back("avx512");
  }
#endif
  return names;
}

std::string default_isa() {
  static const std::string best = available_isas().back();
  return best;
}

std::string resolve_isa(const std::string& name) {
  if (name == "auto") return default_isa();
  const auto names = available_isas();
  if (std::find(names.begin(), names.end(), name) != names.end()) return name;
  std::string list;
  for (const auto& each : names) list += (list.empty() ? "" : ", ") + each;
  throw std::invalid_argument("isa must be auto or one of " + list + " on this CPU, got " + name);
}

}  // namespace mxmoe::host
