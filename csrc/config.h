// How a problem is cut into pieces: pure functions of sizes, so that they are tested without running a kernel. No
// result depends on what they return.
#pragma once
#include <cstdint>

namespace mxmoe {

// Host GEMM. A panel is kPanelLines lines of B over block_steps steps of the contraction; a step is one 32-bit word: a
// pair of BF16 values or one FP32 value.
constexpr int64_t kPanelLines = 64;

struct HostGemmConfig {
  int64_t block_steps;  // so that a panel takes about half of L2
  int64_t chunk_rows;   // rows of A that one task multiplies with one panel
};

constexpr HostGemmConfig pick_config(int64_t l2_bytes) {
  int64_t steps = l2_bytes / 2 / (kPanelLines * 4) / 128 * 128;
  return {steps < 128 ? 128 : steps, 192};
}

static_assert(pick_config(1 << 20).block_steps == 2048);

}  // namespace mxmoe
