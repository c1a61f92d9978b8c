// dispatch: each rank reads the rows of its experts from the memory of their tokens' ranks (peers.h).
//
// A warp takes 32 rows: a lane finds one, the warp copies them one after the other. arrived[i] counts the rows of
// minibatch i that are there, for who computes on them meanwhile.
#pragma once
#include "cuda/kernels/peers.h"

namespace mxmoe::cuda::dispatch {

template <int kWarpsOfCta>
struct config {
  static constexpr int kWarps = kWarpsOfCta;
};

struct shared {};

// An array of rows: of the ranks' tokens, and here.
struct Rows {
  const uint8_t* from[kMaxRanks];
  uint8_t* to;
  int row_bytes;
  bool aligned;
};

template <class M>
struct globals {
  Runs runs;
  const int32_t* permutation[kMaxRanks];
  int top_k;
  bool permuted;  // else `from` are rows in expert order
  Rows rows, more;
  int minibatch;  // rows, a multiple of kChunk
  uint32_t* arrived;
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  m.role("dispatch");
  const auto one = m.elect_one();
  const int num_rows = m.ld_global_uniform(g.runs.starts + g.runs.num_runs);
  for (int first = (m.cta_idx() * C::kWarps + m.warp_idx()) * kChunk; first < num_rows;
       first += m.num_ctas() * C::kWarps * kChunk) {
    const auto row = m.lane_idx() + first;
    const auto at = find_rows(m, g.runs, row);
    auto token = at.place;
    if (g.permuted) {
      auto slot = m.splat(0);
      for (int rank = 0; rank < g.runs.ranks; ++rank)
        slot =
            slot + m.template ld_global<int>(g.permutation[rank], at.place * 4, (at.rank == rank) & (row < num_rows));
      token = slot / g.top_k;
    }
    const int rows = smaller(num_rows - first, kChunk);
    for (int i = 0; i < rows; ++i) {
      const int rank = m.read_lane(at.rank, i);
      const int64_t from = m.read_lane(token, i), to = first + i;
      const auto copy = [&](const Rows& r) {
        copy_row(m, r.to + to * r.row_bytes, r.from[rank] + from * r.row_bytes, r.row_bytes, r.aligned);
      };
      copy(g.rows);
      if (g.more.to) copy(g.more);
    }
    m.syncwarp();
    m.red_release_sys_add(g.arrived + first / g.minibatch, static_cast<uint32_t>(rows), one);
  }
}

MXMOE_LAUNCHABLE("dispatch", shared)

inline Rows rows_of(const std::vector<Tensor>& from, const Tensor& to) {
  Rows r{};
  if (!to) return r;
  r.to = to.ptr<uint8_t>(), r.row_bytes = static_cast<int>(to.sizes[1] * bytes_of(to.dtype));
  r.aligned = rows_aligned(to);
  for (size_t i = 0; i < from.size(); ++i) r.from[i] = from[i].ptr<uint8_t>(), r.aligned &= rows_aligned(from[i]);
  return r;
}

template <class L>
void launch(L& l, const Tensor& starts, const Tensor& sources, const std::vector<Tensor>& permutations, int64_t top_k,
            const std::vector<Tensor>& rows, const std::vector<Tensor>& more, int64_t minibatch, const Tensor& arrived,
            const Tensor& rows_out, const Tensor& more_out) {
  globals<typename L::machine> g{};
  g.runs = runs_of(starts, sources, rows.size());
  for (size_t i = 0; i < permutations.size(); ++i) g.permutation[i] = permutations[i].ptr<int32_t>();
  g.permuted = !permutations.empty(), g.top_k = static_cast<int>(top_k);
  g.rows = rows_of(rows, rows_out), g.more = rows_of(more, more_out);
  g.minibatch = static_cast<int>(minibatch), g.arrived = arrived.ptr<uint32_t>();
  std::vector<Argument> arguments{{"starts", starts},
                                  {"sources", sources},
                                  {"arrived", arrived, Use::kUpdated},
                                  {"rows out", rows_out, Use::kUpdated},  // past the last row: what was there
                                  {"more out", more_out, Use::kUpdated}};
  add_arguments(arguments, "permutation", permutations, Use::kRead);
  add_arguments(arguments, "rows", rows, Use::kRead), add_arguments(arguments, "more", more, Use::kRead);
  l.template run<launchable<config<8>>>(l.num_sms(), g, arguments);
}

}  // namespace mxmoe::cuda::dispatch
