// Grouped GEMM on the CPU. grouped_mm and grouped_mm_wgrad are the same kernel: each group multiplies its own lines of
// A with its own lines of B over its own contraction; the binding works out where each group's operands and output lie.
//
// Numerics: one FP32 accumulator per output takes the contraction in ascending order, so an output's bits depend on its
// row of A and its column's panel of B alone, not on tiling, threads, or other rows.
//   AVX-512, operands exact in BF16: vdpbf16ps, ascending pairs.
//   A row of A or a 64-line panel of B with a scale outside the exact range, operands `in_fp32`, other sets: FP32.
#pragma once
#include <cstdint>

#include "config.h"
#include "host/isa.h"
#include "tensor.h"

namespace mxmoe::host {

enum class Element : uint8_t { kF32, kBF16, kF16, kMxE4M3, kMxE5M2, kMxE2M1, kNvE2M1 };

// What the lines of an operand have in common; strides in bytes.
struct LineFormat {
  Element element;
  bool in_fp32;           // how it is multiplied: FP32 and FP16 always, BF16 where the caller wants it
  bool line_major;        // neighbouring lines are neighbours in memory (else neighbours along the contraction are)
  bool panels;            // quantized, in panels of 64 lines (layout.h), each where its lines would be
  int64_t line_stride;    // from a line to the next
  int64_t k_stride;       // along the contraction; 4-bit values are packed with unit stride
  int64_t scale_stride;   // scales of a line to those of the next; within a line they are contiguous
  int64_t global_stride;  // FP32 values from a line's global scale to the next one's
};

// First line of one group of an operand, at the group's first element of the contraction.
struct Lines {
  const uint8_t* values;
  const uint8_t* scales;  // nullptr: high precision
  const float* global;    // nullptr: none
};

struct GemmGroup {
  Lines a, b;
  const float* bias;  // one per output, nullptr: none
  uint8_t* out;
  int64_t rows, contraction;
  // Filled by the kernel: where the group's packed A and first tasks are.
  int64_t first_row = 0, packed_bytes = 0, first_pack = 0, first_task = 0;
  HostGemmConfig config{};
};

struct GemmProblem {
  LineFormat a, b;
  GemmGroup* groups;
  int64_t num_groups;
  int64_t outputs;
  int64_t out_stride;  // elements, row to row
  DType out_dtype;     // kF32, kBF16, kF16
  bool accumulate;     // out = round(out + product)
  int64_t l2_bytes;
  int num_threads;
};

}  // namespace mxmoe::host

MXMOE_FOR_EACH_ISA(void grouped_gemm(const ::mxmoe::host::GemmProblem& problem);
                   // The same for a few rows per group; false, with nothing done, where only grouped_gemm can do it.
                   bool few_rows_gemm(const ::mxmoe::host::GemmProblem& problem);)
