// Level 2: shared memory. Four warps work on one tile; 64 bytes of each of its lines are brought once, for all of them.
// Two barriers a step: nobody reads before all have written, nobody writes before all have read.
#pragma once
#include "cuda/ladder/problem.h"

namespace mxmoe::cuda::level2 {
using ladder::globals;

struct config {
  static constexpr int kRows = 32, kColumns = 64, kWarps = 4, kStepBytes = 64;
};
struct alignas(16) shared {
  uint8_t lines[config::kRows + config::kColumns][config::kStepBytes];  // of A, then of B
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  using F = typename M::template lane<float>;
  const auto& s = m.template shared<shared>();
  const auto [row, column] = ladder::tile_position<C>(m.cta_idx(), g.columns);
  const int pitch = g.steps * 128, warp = m.warp_idx();  // bytes of a line in global memory
  const auto* lines = reinterpret_cast<const uint8_t*>(warp == 0 ? g.a : g.b) +
                      int64_t{warp == 0 ? row : column + 32 * (warp - 1)} * pitch;
  const auto mine = m.template cast<uint32_t>(m.lane_idx() * C::kStepBytes);
  F y[16] = {};
  for (int at = 0; at < pitch; at += C::kStepBytes) {
    for (uint32_t i = 0; warp < 3 && i < C::kStepBytes; i += 16) {  // a lane brings a line: warp 0 A's, 1 and 2 B's
      typename M::template registers<uint32_t, 4> d;
      m.ld_global_v4(d, lines + at + i, m.lane_idx() * pitch, ladder::every_lane(m));
      m.st_shared_v4(mine + (m.shared_address(&s.lines[32 * warp]) + i), d[0], d[1], d[2], d[3], ladder::every_lane(m));
    }
    m.syncthreads();  // written
    for (uint32_t k = 0; k < C::kStepBytes; k += 4) {
      const auto a = m.ld_shared(mine + (m.shared_address(&s.lines) + k));
      const F low = to_float<Input::kBF16, 0>(m, a), high = to_float<Input::kBF16, 1>(m, a);
      for (int j = 0; j < 16; ++j) {
        const uint32_t b = m.ld_shared_uniform(m.shared_address(&s.lines[C::kRows + 16 * warp + j]) + k);
        y[j] = y[j] + low * __builtin_bit_cast(float, b << 16) + high * __builtin_bit_cast(float, b & 0xffff0000u);
      }
    }
    m.syncthreads();  // read
  }
  ladder::store(m, g, row, column + 16 * warp, y);
}

MXMOE_LAUNCHABLE("ladder 2", shared)

}  // namespace mxmoe::cuda::level2
