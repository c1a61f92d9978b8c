// The tables of an exchange of rows (peers.h), from the offsets of all ranks' own routing. One CTA, a warp per rank.
//
//   begun (+ 1)     this rank -> the others: its tokens and offsets are there, its landed flag is zero
//   landed (+ 1)    this rank -> the others: it has read their offsets
#pragma once
#include "cuda/kernels/peers.h"

namespace mxmoe::cuda::exchange_schedule {

template <int kRanks>
struct config {
  static constexpr int kWarps = kRanks;
};

template <class C>
struct shared {
  uint32_t sizes[kMaxExperts + 32 * kMaxRanks];  // of the runs, then zeros
};

template <class M>
struct globals {
  const int32_t* offs[kMaxRanks];  // (experts,)
  uint32_t* signals[kMaxRanks];    // (kSignals,)
  uint32_t* arrived;               // (minibatches,), zeroed
  int minibatches, rank, ranks, own_experts;
  uint32_t epoch;
  int32_t *starts, *sources, *local_offs;
};

// The runs of one rank's tokens: sizes to shared memory, sources.
template <class M, class C>
MXMOE_KERNEL void read_rank(M& m, const globals<M>& g, shared<C>& s, int rank) {
  const int first = g.rank * g.own_experts;
  for (int i = 0; i < g.own_experts; i += 32) {
    const auto expert = m.lane_idx() + i;
    const auto exists = expert < g.own_experts;
    const auto end = m.template ld_global<int>(g.offs[rank], (expert + first) * 4, exists);
    const auto start =
        m.template ld_global<int>(g.offs[rank], (expert + (first - 1)) * 4, exists & (expert + first > 0));
    const auto run = expert * g.ranks + rank;
    const auto every_lane = expert >= 0;
    m.st_shared(m.template cast<uint32_t>(run * 4) + m.shared_address(s.sizes), m.template cast<uint32_t>(end - start),
                every_lane);
    m.template st_global<int>(g.sources, run * 4, start, exists);
  }
}

template <class M, class C>
MXMOE_KERNEL void sum_runs(M& m, const globals<M>& g, shared<C>& s) {
  const int num_runs = g.own_experts * g.ranks;
  int total = 0;
  for (int i = 0; i < num_runs; i += 32) {
    const auto run = m.lane_idx() + i;
    const auto exists = run < num_runs;
    const auto size = m.template cast<int>(m.ld_shared(m.template cast<uint32_t>(run * 4) + m.shared_address(s.sizes)));
    auto before = m.splat(total), all = size;  // of this and the lanes before, in powers of two
    for (int mask = 1; mask < 32; mask *= 2) {
      const auto other = m.shfl_xor(all, mask);
      before = (m.lane_idx() & mask) != 0 ? before + other : before;
      all = all + other;
    }
    m.template st_global<int>(g.starts, run * 4, before, exists);
    m.template st_global<int>(g.local_offs, run / g.ranks * 4, before + size, exists & (run % g.ranks == g.ranks - 1));
    total += m.read_lane(all, 0);
  }
  m.template st_global<int>(g.starts + num_runs, m.lane_idx() * 4, m.splat(total), m.elect_one());
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  auto& s = m.template shared<shared<C>>();
  const auto one = m.elect_one();
  const int rank = m.warp_idx();
  m.role("schedule");
  for (int i = rank * 32; i < g.minibatches; i += C::kWarps * 32) {
    const auto at = m.lane_idx() + i;
    m.template st_global<uint32_t>(g.arrived, at * 4, m.splat(0u), at < g.minibatches);
  }
  uint32_t* own = g.signals[g.rank];
  if (rank == 0) m.template st_global<uint32_t>(own + kLanded, m.lane_idx() * 4, m.splat(0u), one);
  m.syncthreads();
  if (rank < g.ranks) {
    m.red_release_sys_add(g.signals[rank] + g.rank, 1, one);
    m.wait_acquire_sys(own + rank, g.epoch);
    read_rank<M, C>(m, g, s, rank);
    m.syncwarp();
    m.red_release_sys_add(g.signals[rank] + kLanded, 1, one);
  }
  m.syncthreads();
  if (rank == 0) sum_runs<M, C>(m, g, s);
}

MXMOE_LAUNCHABLE("exchange_schedule", shared<C>)

template <class L>
void launch(L& l, const std::vector<Tensor>& offs, const std::vector<Tensor>& signals, const Tensor& arrived,
            int64_t rank, int64_t epoch, const Tensor& starts, const Tensor& sources, const Tensor& local_offs) {
  globals<typename L::machine> g{};
  for (size_t i = 0; i < offs.size(); ++i)
    g.offs[i] = offs[i].ptr<int32_t>(), g.signals[i] = signals[i].ptr<uint32_t>();
  g.arrived = arrived.ptr<uint32_t>(), g.minibatches = static_cast<int>(arrived.sizes[0]);
  g.rank = static_cast<int>(rank), g.ranks = static_cast<int>(offs.size());
  g.own_experts = static_cast<int>(local_offs.sizes[0]), g.epoch = static_cast<uint32_t>(epoch);
  g.starts = starts.ptr<int32_t>(), g.sources = sources.ptr<int32_t>(), g.local_offs = local_offs.ptr<int32_t>();
  std::vector<Argument> arguments{{"arrived", arrived, Use::kUpdated},
                                  {"starts", starts, Use::kWritten},
                                  {"sources", sources, Use::kWritten},
                                  {"local offs", local_offs, Use::kWritten}};
  add_arguments(arguments, "offs", offs, Use::kRead), add_arguments(arguments, "signals", signals, Use::kUpdated);
  l.template run<launchable<config<kMaxRanks>>>(1, g, arguments);
}

}  // namespace mxmoe::cuda::exchange_schedule
