// Which instruction sets the host backend was compiled for, and which this CPU runs.
// Every csrc/host/*_kernel.cpp is compiled once per set into namespace mxmoe::host::<isa>; nothing else in a kernel
// file may have external linkage, so that code built for a newer CPU is never linked into an older path.
#pragma once
#include <string>
#include <vector>

namespace mxmoe::host {

std::vector<std::string> available_isas();  // best last
std::string default_isa();
// "auto" -> default_isa(); an unavailable or unknown name throws std::invalid_argument.
std::string resolve_isa(const std::string& name);

}  // namespace mxmoe::host

// Picks the function `name` of the namespace of `isa`: MXMOE_DISPATCH(isa, quantize)(args).
#if defined(MXMOE_HAS_AVX512)
#define MXMOE_DISPATCH(isa, name)                   \
  ((isa) == "avx512" ? &::mxmoe::host::avx512::name \
   : (isa) == "avx2" ? &::mxmoe::host::avx2::name   \
                     : &::mxmoe::host::portable::name)
#else
#define MXMOE_DISPATCH(isa, name) (&::mxmoe::host::portable::name)
#endif

// Declares the same functions in the namespace of every set: MXMOE_FOR_EACH_ISA(void f(int);)
#if defined(MXMOE_HAS_AVX512) || defined(MXMOE_ISA)
#define MXMOE_FOR_EACH_ISA(...)     \
  namespace mxmoe::host::portable { \
  __VA_ARGS__                       \
  }                                 \
  namespace mxmoe::host::avx2 {     \
  __VA_ARGS__                       \
  }                                 \
  namespace mxmoe::host::avx512 {   \
  __VA_ARGS__                       \
  }
#else
#define MXMOE_FOR_EACH_ISA(...)     \
  namespace mxmoe::host::portable { \
  __VA_ARGS__                       \
  }
#endif
