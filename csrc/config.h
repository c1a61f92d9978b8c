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

// Whether a host kernel writes an output past the caches: one that they cannot hold until it is read again.
constexpr bool bypasses_cache(int64_t bytes) {
  return bytes >= int64_t{16} << 20;
}

// Row tiles (of 128 rows) that one task of column copies takes in turn: as many as share the cache lines of their
// scales, 64 blocks of 32 rows, but four tasks for each thread.
constexpr int64_t tiles_of_task(int64_t num_tiles, int64_t spans, int threads) {
  int64_t most = num_tiles * spans / (4 * threads);
  return most < 1 ? 1 : most > 16 ? 16 : most;
}

static_assert(tiles_of_task(64, 14, 2) == 16 && tiles_of_task(3, 1, 2) == 1);

}  // namespace mxmoe
