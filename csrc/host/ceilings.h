// What this machine does at most, for benchmarks to compare with: each call keeps every thread busy with nothing but
// multiplications, or with moving memory. Not timed here.
#pragma once
#include <cstdint>

#include "host/isa.h"

// multiply_add: `steps` rounds of independent multiply-adds in registers on each thread, of BF16 pairs (vdpbf16ps,
// AVX-512 only) or of FP32; returns the floating-point operations done, 0 where the set lacks the instruction.
// copy_bytes: memcpy, or with `stream` stores that bypass the cache. read_bytes: returns something that depends on
// every byte.
MXMOE_FOR_EACH_ISA(int64_t multiply_add(bool bf16, int64_t steps, int threads);
                   void copy_bytes(char* to, const char* from, int64_t bytes, bool stream, int threads);
                   int64_t read_bytes(const char* from, int64_t bytes, int threads);)
