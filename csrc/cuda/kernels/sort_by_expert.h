// sort_by_expert: the slots t * top_k + k in stable order of their expert, by a counting sort in three launches.
//
// count: a warp takes a run of slots and counts its experts. scan: per expert, the runs' counts become how many slots
// of that expert are in runs before; the totals are the counts, their sums the offsets. place: each run again, with
// these as cursors. Slots without an expert have a key of their own, past the last expert's.
#pragma once
#include "cuda/launch.h"
#include "cuda/tile/types.h"
#include "layout.h"

namespace mxmoe::cuda::sort_by_expert {

enum class Phase : uint8_t { kCount, kScan, kPlace };

template <Phase kWhich, int kMostKeys>
struct config {
  static constexpr Phase kPhase = kWhich;
  static constexpr int kWarps = kPhase == Phase::kScan ? 8 : 1, kKeys = kMostKeys;
  static_assert(kKeys % 32 == 0, "warps read and write whole lines of keys");
};

template <class C>
struct shared {
  alignas(16) uint8_t of_key[C::kKeys * 4];  // 32-bit counts or cursors
};

template <class M>
struct globals {
  const int32_t* ids;  // (slots,)
  int slots, experts, runs, slots_of_run;
  int32_t* run_counts;             // (runs, experts + 1), a workspace
  int32_t *counts, *offs;          // (experts,)
  int32_t *permutation, *inverse;  // (slots,)
};

// The slots of a run, 32 at a time: body(first slot, lanes that have one, their keys). A key past that of "no expert"
// is for lanes without a slot.
template <class M, class Body>
MXMOE_KERNEL void each_32(M& m, const globals<M>& g, Body body) {
  using U = typename M::template lane<uint32_t>;
  const int start = m.cta_idx() * g.slots_of_run;
  const int end = g.slots - start < g.slots_of_run ? g.slots : start + g.slots_of_run;
  for (int first = start; first < end; first += 32) {
    const auto inside = m.lane_idx() + first < end;
    const auto id = m.template ld_global<int>(g.ids + first, m.lane_idx() * 4, inside);
    const U key = m.template cast<uint32_t>((id >= 0) & (id < g.experts) ? id : m.splat(g.experts));
    body(first, inside, inside ? key : U{} + static_cast<uint32_t>(g.experts + 1));
  }
}

// The next places of each lane's key, in lane order; the keys' counts go on past them.
template <class M, class U>
MXMOE_KERNEL U take_places(M& m, uint32_t of_key, U key) {
  const U same = m.match_any(key), before = ((U{} + 1u) << m.template cast<uint32_t>(m.lane_idx())) - 1u;
  const U address = key * 4u + of_key, first = m.ld_shared(address), rank = m.popc(same & before);
  m.syncwarp();
  m.st_shared(address, first + m.popc(same), m.lane_idx() >= 0);  // lanes of a key write the same
  m.syncwarp();
  return first + rank;
}

template <class M>
MXMOE_KERNEL void count(M& m, const globals<M>& g, uint32_t of_key) {
  using U = typename M::template lane<uint32_t>;
  const int keys = g.experts + 1;
  const U lane = m.template cast<uint32_t>(m.lane_idx());
  for (int key = 0; key < keys + 1; key += 32)
    m.st_shared((lane + static_cast<uint32_t>(key)) * 4u + of_key, U{}, m.lane_idx() >= 0);
  m.syncwarp();
  each_32(m, g, [&](int, auto, U key) { take_places(m, of_key, key); });
  for (int key = 0; key < keys; key += 32) {
    const auto inside = m.lane_idx() + key < keys;
    const U counted = m.ld_shared((lane + static_cast<uint32_t>(key)) * 4u + of_key);
    m.template st_global<uint32_t>(g.run_counts + int64_t{m.cta_idx()} * keys + key, m.lane_idx() * 4, counted, inside);
  }
}

template <class C, class M>
MXMOE_KERNEL void scan(M& m, const globals<M>& g, uint32_t of_key) {
  using U = typename M::template lane<uint32_t>;
  constexpr int kAtOnce = 8;  // loads in flight
  const int keys = g.experts + 1;
  const U lane = m.template cast<uint32_t>(m.lane_idx());
  for (int key = m.warp_idx() * 32; key < keys; key += C::kWarps * 32) {
    const auto inside = m.lane_idx() + key < keys;
    U total{};
    for (int run = 0; run < g.runs; run += kAtOnce) {
      U counted[kAtOnce];
      int32_t* counts = g.run_counts + int64_t{run} * keys + key;
      unrolled<kAtOnce>([&](int i) {
        counted[i] = m.template ld_global<uint32_t>(counts + int64_t{i} * keys, m.lane_idx() * 4,
                                                    inside & (m.splat(run + i) < g.runs));
      });
      unrolled<kAtOnce>([&](int i) {
        if (run + i < g.runs)
          m.template st_global<uint32_t>(counts + int64_t{i} * keys, m.lane_idx() * 4, total, inside);
        total = total + counted[i];
      });
    }
    m.st_shared((lane + static_cast<uint32_t>(key)) * 4u + of_key, total, m.lane_idx() >= 0);
  }
  m.syncthreads();
  if (m.warp_idx() != 0) return;
  uint32_t before = 0;
  for (int key = 0; key < g.experts; key += 32) {
    const auto inside = m.lane_idx() + key < g.experts;
    const U counted = m.ld_shared((lane + static_cast<uint32_t>(key)) * 4u + of_key);
    U end = counted;
    for (int delta = 1; delta < 32; delta *= 2) {
      const U below = m.shfl_up(end, delta);
      end = m.lane_idx() >= delta ? end + below : end;
    }
    end = end + before;
    m.template st_global<uint32_t>(g.counts + key, m.lane_idx() * 4, counted, inside);
    m.template st_global<uint32_t>(g.offs + key, m.lane_idx() * 4, end, inside);
    before = m.read_lane(end, 31);
  }
}

template <class M>
MXMOE_KERNEL void place(M& m, const globals<M>& g, uint32_t of_key) {
  using U = typename M::template lane<uint32_t>;
  using I = typename M::template lane<int>;
  const int keys = g.experts + 1;
  const U lane = m.template cast<uint32_t>(m.lane_idx());
  for (int key = 0; key < keys + 1; key += 32) {
    const auto inside = m.lane_idx() + key < keys;
    const auto has_start = inside & (m.lane_idx() + key > 0);
    const U before =
        m.template ld_global<uint32_t>(g.run_counts + int64_t{m.cta_idx()} * keys + key, m.lane_idx() * 4, inside);
    const U start = m.template ld_global<uint32_t>(g.offs + key - 1, m.lane_idx() * 4, has_start);
    m.st_shared((lane + static_cast<uint32_t>(key)) * 4u + of_key, before + start, m.lane_idx() >= 0);
  }
  m.syncwarp();
  each_32(m, g, [&](int first, auto inside, U key) {
    const I row = m.template cast<int>(take_places(m, of_key, key)), slot = m.lane_idx() + first;
    const auto chosen = key < static_cast<uint32_t>(g.experts);
    m.template st_global<int>(g.inverse + first, m.lane_idx() * 4, chosen ? row : I{} - 1, inside);
    m.template st_global<int>(g.permutation, row * 4, chosen ? slot : I{} - 1, inside);
  });
}

template <class C, class M>
MXMOE_KERNEL void kernel(M& m, const globals<M>& g) {
  m.role("sort_by_expert");
  const uint32_t of_key = m.shared_address(m.template shared<shared<C>>().of_key);
  if constexpr (C::kPhase == Phase::kCount) count(m, g, of_key);
  if constexpr (C::kPhase == Phase::kScan) scan<C>(m, g, of_key);
  if constexpr (C::kPhase == Phase::kPlace) place(m, g, of_key);
}

MXMOE_LAUNCHABLE("sort_by_expert", shared<C>)

constexpr int kFewKeys = 1024, kManyKeys = 16384;

// ids int32 (T, K); run_counts int32 (runs, E + 1), a workspace; counts, offs int32 (E,); permutation int32 (T * K,),
// inverse int32 (T, K).
template <class L>
void launch(L& l, const Tensor& ids, const Tensor& run_counts, const Tensor& counts, const Tensor& offs,
            const Tensor& permutation, const Tensor& inverse) {
  globals<typename L::machine> g{};
  g.ids = ids.ptr<int32_t>(), g.slots = static_cast<int>(permutation.sizes[0]);
  g.experts = static_cast<int>(counts.sizes[0]), g.runs = static_cast<int>(run_counts.sizes[0]);
  g.slots_of_run = g.runs ? static_cast<int>(round_up(ceil_div(g.slots, g.runs), 32)) : 0;
  g.run_counts = run_counts.ptr<int32_t>(), g.counts = counts.ptr<int32_t>(), g.offs = offs.ptr<int32_t>();
  g.permutation = permutation.ptr<int32_t>(), g.inverse = inverse.ptr<int32_t>();
  const auto run = [&]<int kKeys>() {
    l.template run<launchable<config<Phase::kCount, kKeys>>>(g.runs, g,
                                                             {{"ids", ids}, {"run_counts", run_counts, Use::kWritten}});
    l.template run<launchable<config<Phase::kScan, kKeys>>>(
        1, g,
        {{"run_counts", run_counts, Use::kUpdated}, {"counts", counts, Use::kWritten}, {"offs", offs, Use::kWritten}});
    l.template run<launchable<config<Phase::kPlace, kKeys>>>(g.runs, g,
                                                             {{"ids", ids},
                                                              {"run_counts", run_counts},
                                                              {"offs", offs},
                                                              {"permutation", permutation, Use::kWritten},
                                                              {"inverse", inverse, Use::kWritten}});
  };
  if (g.experts + 2 <= kFewKeys) return run.template operator()<kFewKeys>();
  return run.template operator()<kManyKeys>();
}

}  // namespace mxmoe::cuda::sort_by_expert
