// The host backend's own thread pool. Workers are parked between calls; a forked child gets a pool of its own.
#pragma once
#include <cstdint>
#include <type_traits>

namespace mxmoe::host {

using TaskFn = void (*)(void* context, int64_t task, int thread);

// Runs task 0 .. num_tasks - 1, each exactly once, on at most num_threads threads (the caller is one of them), handed
// out dynamically in ascending order; returns when all are done. Every thread runs with IEEE subnormals (no FTZ, no
// DAZ, round to nearest) and gets its floating-point state back afterwards. Nested calls run on the caller. Tasks must
// not throw.
void parallel_for(int num_threads, int64_t num_tasks, TaskFn fn, void* context);

int pool_size();

// parallel(threads, tasks, [&](int64_t task, int thread) { ... })
template <typename F>
static inline void parallel(int num_threads, int64_t num_tasks, F&& body) {
  parallel_for(
      num_threads, num_tasks,
      [](void* context, int64_t task, int thread) {
        (*static_cast<std::remove_reference_t<F>*>(context))(task, thread);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Memory kept from call to call, 64-byte aligned, on huge pages where the system grants them; one per calling thread
// and slot, grown on demand. Contents are whatever the last call left.
enum class WorkspaceSlot : int { kA = 0, kB = 1, kC = 2, kThread = 3, kCount = 4 };
void* workspace(WorkspaceSlot slot, int64_t bytes);
void release_workspaces();  // frees those of the calling thread

}  // namespace mxmoe::host
