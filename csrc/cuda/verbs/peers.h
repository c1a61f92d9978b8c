#pragma once
#include "cuda/kernels/combine.h"
#include "cuda/kernels/dispatch.h"
#include "cuda/kernels/exchange_schedule.h"
#include "cuda/verbs.h"

namespace mxmoe::cuda {

template <class L>
void run_exchange_schedule(L& l, const std::vector<Tensor>& offs, const std::vector<Tensor>& signals,
                           const Tensor& arrived, int64_t rank, int64_t epoch, const Tensor& starts,
                           const Tensor& sources, const Tensor& local_offs) {
  exchange_schedule::launch(l, offs, signals, arrived, rank, epoch, starts, sources, local_offs);
}

template <class L>
void run_dispatch(L& l, const Tensor& starts, const Tensor& sources, const std::vector<Tensor>& permutations,
                  int64_t top_k, const std::vector<Tensor>& rows, const std::vector<Tensor>& more, int64_t minibatch,
                  const Tensor& arrived, const Tensor& rows_out, const Tensor& more_out) {
  dispatch::launch(l, starts, sources, permutations, top_k, rows, more, minibatch, arrived, rows_out, more_out);
}

template <class L>
void run_combine(L& l, const Tensor& starts, const Tensor& sources, const Tensor& rows,
                 const std::vector<Tensor>& landing, const std::vector<Tensor>& signals, int64_t rank,
                 const Tensor& arrived, int64_t minibatch, const Tensor& offs, const Tensor& inverse,
                 const Tensor& weights, const Tensor& out) {
  combine::launch(l, starts, sources, rows, landing, signals, rank, arrived, minibatch, offs, inverse, weights, out);
}

}  // namespace mxmoe::cuda
