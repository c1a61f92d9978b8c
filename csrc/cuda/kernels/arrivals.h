// Rows that come while a kernel runs, counted by minibatches in flags by who brings them (dispatch.h). That kernel must
// have been launched before: a persistent one that waits leaves no room for it.
#pragma once
#include <cstdint>

#include "cuda/tile/types.h"
#include "tensor.h"

namespace mxmoe::cuda {

struct Arrivals {
  const uint32_t* counts;  // null: all rows are there
  int minibatch;           // rows

  // Until rows [first, end) of num_rows are there.
  template <class M>
  MXMOE_KERNEL void wait(M& m, int first, int end, int num_rows) const {
    for (int batch = first / minibatch; batch * minibatch < end; ++batch) {
      const int left = num_rows - batch * minibatch;
      m.wait_acquire_sys(counts + batch, static_cast<uint32_t>(left < minibatch ? left : minibatch));
    }
  }
};

inline Arrivals arrivals_of(const Tensor& arrived, int64_t minibatch) {
  return {arrived.ptr<uint32_t>(), static_cast<int>(minibatch)};
}

}  // namespace mxmoe::cuda
