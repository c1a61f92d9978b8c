// Ranks that reach each other's memory: which routed rows go where, and the flags by which ranks wait for each other.
//
// Rank d of R holds experts d * E / R and on. Its rows lie by (expert, rank of the token, place there). A run is the
// rows of one expert from one rank: of run q = expert * R + rank, starts[q] is the first row here, sources[q] the first
// row in expert order there.
#pragma once
#include <vector>

#include "cuda/kernels/elements.h"
#include "cuda/launch.h"
#include "cuda/tile/types.h"

namespace mxmoe::cuda {

constexpr int kMaxRanks = 8, kMaxExperts = 4096;
// A rank's flags: epochs that the others have begun, then rows that have landed (and ranks that have read its offsets).
constexpr int kLanded = kMaxRanks, kSignals = kMaxRanks + 1;
constexpr int kChunk = 32;  // rows that a warp takes, one lane each to find them

struct Runs {
  const int32_t *starts, *sources;
  int ranks, num_runs;
};

// Of each lane's row: the rank of its token and its place in expert order there.
template <class I>
struct Places {
  I rank, place;
};

template <class M, class I>
MXMOE_KERNEL Places<I> find_rows(M& m, const Runs& runs, I row) {
  I run = m.splat(0);
  for (int step = kMaxExperts / 2; step; step /= 2) {
    if (step >= runs.num_runs) continue;
    const auto exists = run + step < runs.num_runs;
    const I start = m.template ld_global<int>(runs.starts, (run + step) * 4, exists);
    run = (exists & (start <= row)) ? run + step : run;
  }
  const auto all = run >= 0;
  const I place = m.template ld_global<int>(runs.sources, run * 4, all) + row -
                  m.template ld_global<int>(runs.starts, run * 4, all);
  return {run % runs.ranks, place};
}

// One row by a warp: 16 bytes a lane four times over, or byte by byte where rows are not aligned.
template <class M>
MXMOE_KERNEL void copy_row(M& m, uint8_t* to, const uint8_t* from, int num_bytes, bool aligned) {
  constexpr int kTimes = 4;
  if (!aligned) {
    for (int first = 0; first < num_bytes; first += 32) {
      const auto at = m.lane_idx() + first;
      m.template st_global<uint8_t>(to, at, m.template ld_global<uint8_t>(from, at, at < num_bytes), at < num_bytes);
    }
    return;
  }
  for (int first = 0; first < num_bytes; first += kTimes * 512) {
    typename M::template registers<uint32_t, 4> words[kTimes];
    const auto at = m.lane_idx() * 16 + first;
    unrolled<kTimes>([&](int i) { m.ld_global_v4(words[i], from, at + i * 512, at + i * 512 < num_bytes); });
    unrolled<kTimes>([&](int i) {
      auto& word = words[i];
      m.st_global_v4(to, at + i * 512, word[0], word[1], word[2], word[3], at + i * 512 < num_bytes);
    });
  }
}

// How many lanes have it.
template <class M, class P>
MXMOE_KERNEL int count_lanes(M& m, P p) {
  auto total = m.select(p, m.splat(1), m.splat(0));
  for (int mask = 1; mask < 32; mask *= 2) total = total + m.shfl_xor(total, mask);
  return m.read_lane(total, 0);
}

inline bool rows_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.sizes[1] * bytes_of(t.dtype) % 16 == 0;
}

inline Runs runs_of(const Tensor& starts, const Tensor& sources, size_t ranks) {
  return {starts.ptr<int32_t>(), sources.ptr<int32_t>(), static_cast<int>(ranks), static_cast<int>(sources.sizes[0])};
}

inline void add_arguments(std::vector<Argument>& all, const char* name, const std::vector<Tensor>& of_ranks, Use use) {
  for (size_t i = 0; i < of_ranks.size(); ++i)
    all.push_back({name + (" of rank " + std::to_string(i)), of_ranks[i], use});
}

}  // namespace mxmoe::cuda
