// The smallest kernel of a cluster, a test of its vocabulary: out = x and sum += x, by pairs of CTAs.
//
// Each CTA of a pair brings a tile of 32 rows of x. The first one's barrier counts the bytes of both; when they are
// there, its arrival at the second one's barrier lets that go on. Both store their tile, and add it.
//
//   arrived (TMA bytes of both)   TMA   -> first CTA
//   go (1 arrival)                first -> second CTA
#pragma once
#include "cuda/launch.h"
#include "cuda/tile/types.h"
#include "layout.h"

namespace mxmoe::cuda::cluster_copy {

template <int kCtas>
struct config {
  static constexpr int kRows = 32, kRowBytes = 128, kWarps = 1, kCluster = kCtas;
};

template <class C>
struct shared {
  st<C::kRows, C::kRowBytes, Swizzle::k128B> tile;
  barrier arrived, go;
};

template <class M>
struct globals {
  typename M::tensor_map x, out, sum;
};

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  auto& s = m.template shared<shared<C>>();
  const auto one = m.elect_one();
  const bool first = m.cluster_ctarank() == 0;
  const int row = m.cta_idx() * C::kRows;
  m.mbarrier_init(s.arrived, 1, one);
  m.mbarrier_init(s.go, 1, one);
  m.fence_mbarrier_init();
  m.barrier_cluster_arrive();
  m.barrier_cluster_wait();
  if (first) m.mbarrier_arrive_expect_tx(s.arrived, C::kCluster * decltype(s.tile)::num_bytes, one);
  m.tma_load_pair(&s.tile, g.x, 0, row, m.mapa(m.shared_address(&s.arrived), 0), one);
  if (first) {
    m.mbarrier_wait(s.arrived, 0);
    m.mbarrier_arrive_cluster(m.mapa(m.shared_address(&s.go), 1), one);
  } else {
    m.mbarrier_wait_cluster(s.go, 0);
  }
  m.tma_store(g.out, 0, row, &s.tile, one);
  m.tma_reduce_add(g.sum, 0, row, &s.tile, one);
  m.bulk_commit_group();
  m.template bulk_wait_group_read<0>();  // neither ends before what the other does to its barrier: it has waited for it
}

MXMOE_LAUNCHABLE("cluster_copy", shared<C>)

// x, out, sum (rows, 128 bytes) of one dtype; sum is added to.
template <class L>
void launch(L& l, const Tensor& x, const Tensor& out, const Tensor& sum) {
  using C = config<2>;
  const auto map = [&](const Tensor& t) { return l.tensor_map(t, C::kRows, C::kRowBytes, Swizzle::k128B); };
  globals<typename L::machine> g{map(x), map(out), map(sum)};
  l.template run<launchable<C>>(ceil_div(x.sizes[0], C::kCluster * C::kRows) * C::kCluster, g,
                                {{"x", x}, {"out", out, Use::kWritten}, {"sum", sum, Use::kUpdated}});
}

}  // namespace mxmoe::cuda::cluster_copy
