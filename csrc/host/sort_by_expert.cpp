// O(N) stable counting sort: chunks count, one pass places every (expert, chunk), chunks scatter.
#include <algorithm>
#include <cstring>

#include "host/route.h"
#include "host/threads.h"

namespace mxmoe::host {

void sort_by_expert(const int32_t* ids, int64_t num_slots, int64_t num_experts, int32_t* counts, int32_t* offs,
                    int32_t* permutation, int32_t* inverse, int threads) {
  constexpr int64_t kMinChunk = 8192;  // slots; below this a second thread costs more than it saves
  int64_t num_chunks = std::clamp<int64_t>(num_slots / std::max(kMinChunk, num_experts), 1, std::max(threads, 1));
  int64_t chunk_slots = (num_slots + num_chunks - 1) / num_chunks;
  auto* next = static_cast<int32_t*>(workspace(WorkspaceSlot::kA, num_chunks * num_experts * sizeof(int32_t)));
  auto is_expert = [=](int32_t id) { return id >= 0 && id < num_experts; };

  parallel(threads, num_chunks, [&](int64_t chunk, int) {
    int32_t* count = next + chunk * num_experts;
    memset(count, 0, num_experts * sizeof(int32_t));
    int64_t end = std::min(num_slots, (chunk + 1) * chunk_slots);
    for (int64_t slot = chunk * chunk_slots; slot < end; ++slot)
      if (is_expert(ids[slot])) ++count[ids[slot]];
  });

  int32_t row = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    int32_t first = row;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      int32_t& place = next[chunk * num_experts + e];
      int32_t rows = place;
      place = row;
      row += rows;
    }
    counts[e] = row - first;
    offs[e] = row;
  }
  std::fill(permutation + row, permutation + num_slots, -1);

  parallel(threads, num_chunks, [&](int64_t chunk, int) {
    int32_t* place = next + chunk * num_experts;
    int64_t end = std::min(num_slots, (chunk + 1) * chunk_slots);
    for (int64_t slot = chunk * chunk_slots; slot < end; ++slot) {
      int32_t target = is_expert(ids[slot]) ? place[ids[slot]]++ : -1;
      inverse[slot] = target;
      if (target >= 0) permutation[target] = static_cast<int32_t>(slot);
    }
  });
}

}  // namespace mxmoe::host
