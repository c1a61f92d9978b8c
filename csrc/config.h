// How a problem is cut into pieces: pure functions of sizes, so that they are tested without running a kernel. No
// result depends on what they return.
#pragma once
#include <cstdint>

#include "layout.h"

namespace mxmoe {

// Host GEMM. A panel is kPanelLines lines of B over block_steps steps of the contraction; a step is one 32-bit word: a
// pair of BF16 values or one FP32 value.
struct HostGemmConfig {
  static constexpr int64_t kFewRows = 8;  // of a group: reading B takes longer than multiplying it

  int64_t block_steps;   // of a contraction: a longer one is cut
  int64_t block_panels;  // packed together: short contractions, so that rows of the output are written in long pieces
  int64_t chunk_rows;    // rows of A that one task multiplies with its panels
  int64_t run_panels;    // panels of one task
  bool swapped;          // a chunk of A becomes lanes of vectors: it fills them and stays in half of L2
};

// For a group of `rows` x `outputs` with `steps`, in a problem whose tasks should not exceed `task_work` (rows x panels
// x steps): a panel takes at most half of L2, panels packed together a quarter. Few rows: long runs, because the first
// panel of a run may not have been fetched. may_swap: B must be decoded.
constexpr HostGemmConfig pick_config(int64_t l2_bytes, int64_t rows, int64_t outputs, int64_t steps, int64_t task_work,
                                     bool may_swap) {
  constexpr int64_t kMaxRows = 1024, kMinRows = 96, kMaxPanels = 16, kFewRowsRun = 8, kLanes = 16, kMaxIdle = 8,
                    kManyRows = 128;
  const bool few_rows = rows <= HostGemmConfig::kFewRows;
  const auto clamp = [](int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; };
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  HostGemmConfig c{};
  c.block_steps = l2_bytes / 2 / (kPanelLines * 4) / 128 * 128;
  c.block_steps = clamp(c.block_steps, 128, 1 << 20);
  steps = clamp(steps, 1, 1 << 30);
  c.block_panels = clamp(c.block_steps / 2 / steps, 1, kMaxPanels);
  const int64_t most = l2_bytes / 2 / (4 * steps) / kPanelLines * kPanelLines;
  const int64_t idle = ceil_div(rows, kLanes) * kLanes - rows;
  c.swapped =
      may_swap && rows > 2 * kLanes && (rows <= most || most >= kManyRows) && (rows >= kManyRows || idle <= kMaxIdle);
  const int64_t chunks = ceil_div(rows, c.swapped ? most : clamp(task_work / steps, kMinRows, kMaxRows));
  c.chunk_rows = chunks ? ceil_div(rows, chunks) : 1;
  if (c.swapped) c.chunk_rows = ceil_div(c.chunk_rows, kLanes) * kLanes;
  const int64_t panels = ceil_div(outputs, kPanelLines);
  c.run_panels = clamp(task_work / (c.chunk_rows * steps), few_rows ? kFewRowsRun : 1, panels);
  c.run_panels = ceil_div(panels, ceil_div(panels, c.run_panels));  // alike
  c.run_panels = ceil_div(c.run_panels, c.block_panels) * c.block_panels;
  return c;
}

static_assert(pick_config(1 << 20, 512, 2048, 512, 1 << 20, false).block_steps == 2048);
static_assert(pick_config(1 << 20, 512, 2048, 512, 1 << 20, true).chunk_rows == 256);

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
