// What the CTAs of a cluster say to each other: their barrier, and arrivals at each other's mbarriers.
#include "interpreter/machine.h"

namespace mxmoe::interpreter {

int Warp::cluster_ctarank() const {
  return w.cta->cluster_rank;
}

uint32_t Warp::mapa(uint32_t address, int rank, Where where) {
  const Op op = begin("mapa", where);
  if (op.is("rank")) rank ^= 1;
  if (rank < 0 || static_cast<size_t>(rank) >= w.cta->cluster->ctas.size())
    grid.fail(w, op, "out of bounds", "no CTA " + std::to_string(rank) + " in the cluster");
  return (static_cast<uint32_t>(rank) + 1) * kClusterWindow + address % kClusterWindow;
}

void Warp::barrier_cluster_arrive(Where where) {
  const Op op = begin("barrier.cluster.arrive", where);
  if (op.is("skip")) return;
  if (w.cluster_generation >= 0) grid.fail(w, op, "barrier", "the warp has arrived already and not waited");
  Rendezvous& barrier = w.cta->cluster->barrier;
  w.cluster_generation = barrier.generation;
  barrier.arrive(w);
  grid.release(w);
  barrier.complete();
}

void Warp::barrier_cluster_wait(Where where) {
  const Op op = begin("barrier.cluster.wait", where);
  if (op.is("skip")) return;
  const int64_t generation = w.cluster_generation;
  if (generation < 0) grid.fail(w, op, "barrier", "the warp has not arrived");
  Rendezvous& barrier = w.cta->cluster->barrier;
  block(op, [&barrier, generation] { return barrier.generation != generation; }, [] { return "in barrier.cluster"; });
  w.cluster_generation = -1;
  w.generic.join(barrier.completed), w.async.join(barrier.completed_async);
}

void Warp::mbarrier_arrive_cluster(uint32_t address, pred p, Where where) {
  const Op op = begin("mbarrier.arrive.cluster", where);
  p = active(op, p);
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    const auto [cta, at] = grid.in_cluster(w, op, address);
    Barrier& b = grid.barrier_of(*cta, w, op, at);
    const uint32_t record = grid.record(w, op, Proxy::kGeneric, false, w.component, w.step);
    grid.touch_shared_of(*cta, w, op, record, w.view(), at, sizeof(barrier));
    if (cta == w.cta) {
      grid.arrive(w, op, b, 1, w.generic, &w.async);
    } else {
      b.arriving_remote.join(w.generic), b.arriving_remote_async.join(w.async);
      grid.arrive(w, op, b, 1, Clock(), nullptr);
    }
    grid.release(w);
  }
}

void Warp::mbarrier_wait_cluster(barrier& b, uint32_t parity, Where where) {
  wait_for(begin("mbarrier.wait.cluster", where), b, parity, true);
}

}  // namespace mxmoe::interpreter
