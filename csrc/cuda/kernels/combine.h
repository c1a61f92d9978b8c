// combine: each rank writes its experts' outputs to the ranks of their tokens, in expert order there; then each sums
// its tokens' rows as unpermute does, whose text it runs.
//
//   arrived (rows of a minibatch)   dispatch, or who computes -> here, where they run at the same time
//   landed (rows, and one per rank) every rank -> the tokens' rank
#pragma once
#include <stdexcept>

#include "cuda/kernels/arrivals.h"
#include "cuda/kernels/peers.h"
#include "cuda/kernels/unpermute.h"

namespace mxmoe::cuda::combine {

template <Input kInputType, Input kOutputType>
struct config : unpermute::config<kInputType, kOutputType> {};

struct shared {};

template <class M>
struct globals {
  Runs runs;
  const uint8_t* rows;
  uint8_t* landing[kMaxRanks];
  int row_bytes;
  bool aligned;
  uint32_t* signals[kMaxRanks];
  int rank, experts;
  Arrivals arrivals;           // of rows
  const int32_t* offs;         // of this rank's own tokens
  unpermute::globals<M> sums;  // of what lands here
};

template <class M, class C>
MXMOE_KERNEL void push(M& m, const globals<M>& g) {
  const auto one = m.elect_one();
  const int num_rows = m.ld_global_uniform(g.runs.starts + g.runs.num_runs);
  for (int first = (m.cta_idx() * C::kWarps + m.warp_idx()) * kChunk; first < num_rows;
       first += m.num_ctas() * C::kWarps * kChunk) {
    const auto row = m.lane_idx() + first;
    const auto at = find_rows(m, g.runs, row);
    const int rows = smaller(num_rows - first, kChunk);
    if (g.arrivals.counts) g.arrivals.wait(m, first, first + rows, num_rows);
    for (int i = 0; i < rows; ++i) {
      const int64_t place = m.read_lane(at.place, i);
      copy_row(m, g.landing[m.read_lane(at.rank, i)] + place * g.row_bytes, g.rows + int64_t{first + i} * g.row_bytes,
               g.row_bytes, g.aligned);
    }
    m.syncwarp();
    for (int rank = 0; rank < g.runs.ranks; ++rank) {
      const int count = count_lanes(m, (at.rank == rank) & (row < num_rows));
      if (count) m.red_release_sys_add(g.signals[rank] + kLanded, static_cast<uint32_t>(count), one);
    }
  }
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  m.role("combine");
  push<M, C>(m, g);
  const int landing = m.ld_global_uniform(g.offs + g.experts - 1);
  m.wait_acquire_sys(g.signals[g.rank] + kLanded, static_cast<uint32_t>(landing + g.runs.ranks));
  for (int token = m.cta_idx() * C::kWarps + m.warp_idx(); token < g.sums.tokens; token += m.num_ctas() * C::kWarps)
    unpermute::sum_token<C>(m, g.sums, token);
}

MXMOE_LAUNCHABLE("combine", shared)

template <class L>
void launch(L& l, const Tensor& starts, const Tensor& sources, const Tensor& rows, const std::vector<Tensor>& landing,
            const std::vector<Tensor>& signals, int64_t rank, const Tensor& arrived, int64_t minibatch,
            const Tensor& offs, const Tensor& inverse, const Tensor& weights, const Tensor& out) {
  const auto own = static_cast<size_t>(rank);
  globals<typename L::machine> g{};
  g.runs = runs_of(starts, sources, landing.size());
  g.rows = rows.ptr<uint8_t>(), g.row_bytes = static_cast<int>(rows.sizes[1] * bytes_of(rows.dtype));
  g.aligned = rows_aligned(rows);
  for (size_t i = 0; i < landing.size(); ++i) {
    g.landing[i] = landing[i].ptr<uint8_t>(), g.signals[i] = signals[i].ptr<uint32_t>();
    g.aligned &= rows_aligned(landing[i]);
  }
  g.rank = static_cast<int>(rank), g.experts = static_cast<int>(offs.sizes[0]);
  g.arrivals = arrivals_of(arrived, minibatch), g.offs = offs.ptr<int32_t>();
  g.sums = unpermute::globals_of<typename L::machine>(landing[own], inverse, weights, out);
  std::vector<Argument> arguments{
      {"starts", starts}, {"sources", sources}, {"rows", rows},       {"arrived", arrived},
      {"offs", offs},     {"inverse", inverse}, {"weights", weights}, {"out", out, Use::kWritten}};
  add_arguments(arguments, "landing", landing, Use::kWritten);
  add_arguments(arguments, "signals", signals, Use::kUpdated);
  with_input(out.dtype, [&]<Input kOutput>() {
    if (rows.dtype == DType::kF32)
      l.template run<launchable<config<Input::kF32, kOutput>>>(l.num_sms(), g, arguments);
    else if (rows.dtype == DType::kBF16)
      l.template run<launchable<config<Input::kBF16, kOutput>>>(l.num_sms(), g, arguments);
    else
      throw std::invalid_argument("combine takes rows in FP32 or BF16");
  });
}

}  // namespace mxmoe::cuda::combine
