#include "host/threads.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mxmoe::host {
namespace {

// IEEE floating point for the length of a scope.
class FloatState {
 public:
#if defined(__x86_64__)
  FloatState() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // all exceptions masked, round to nearest, no FTZ / DAZ
  ~FloatState() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatState() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~FloatState() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_ = 0;
#endif
};

thread_local bool inside_task = false;

// Waits a little for what is about to happen: sleeping and being woken takes longer than the pause between two verbs.
template <typename F>
bool spin_until(F&& happened, std::chrono::microseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (happened()) return true;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return happened();
}

class Pool {
 public:
  void run(int num_threads, int64_t num_tasks, TaskFn fn, void* context) {
    std::lock_guard<std::mutex> one_job(job_mutex_);
    grow(num_threads - 1);
    leave_cpu_of_caller();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      fn_ = fn, context_ = context, num_tasks_ = num_tasks;
      next_.store(0, std::memory_order_relaxed);
      helpers_ = num_threads - 1, running_ = num_threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    drain(0);
    const auto done = [&] { return running_.load(std::memory_order_acquire) == 0; };
    spin_until(done, kSpin);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, done);
  }

  int size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(workers_.size());
  }

 private:
  void grow(int wanted) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (static_cast<int>(workers_.size()) < wanted) {
      int id = static_cast<int>(workers_.size()) + 1;
      std::thread worker([this, id, seen = generation_.load()] { work(id, seen); });
      workers_.push_back(worker.native_handle());
      worker.detach();
      caller_cpu_ = -1;
    }
  }

  // A scheduler may wake a thread on the CPU of the one that wakes it, where it waits until the caller's share is done.
  void leave_cpu_of_caller() {
#if defined(__linux__)
    const int cpu = sched_getcpu();
    if (cpu == caller_cpu_) return;
    caller_cpu_ = cpu;
    cpu_set_t others;
    if (cpu < 0 || sched_getaffinity(0, sizeof(others), &others) != 0) return;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) == 0) return;
    for (pthread_t worker : workers_) pthread_setaffinity_np(worker, sizeof(others), &others);
#endif
  }

  void work(int id, uint64_t seen) {
    for (;;) {
      spin_until([&] { return generation_.load(std::memory_order_relaxed) != seen; }, kSpin);
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_ != seen && id <= helpers_; });
        seen = generation_;
      }
      drain(id);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  void drain(int thread) {
    FloatState ieee;
    inside_task = true;
    for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_;)
      fn_(context_, task, thread);
    inside_task = false;
  }

  std::mutex job_mutex_, mutex_;
  std::condition_variable wake_, done_;
  static constexpr std::chrono::microseconds kSpin{50};
  std::vector<pthread_t> workers_;
  std::atomic<int64_t> next_{0};
  TaskFn fn_ = nullptr;
  void* context_ = nullptr;
  int64_t num_tasks_ = 0;
  int helpers_ = 0, caller_cpu_ = -1;
  std::atomic<int> running_{0};
  std::atomic<uint64_t> generation_{0};
};

// Never destroyed: parked workers may outlive static destructors. After fork the child starts anew; the parent's is
// left alone.
Pool* pool_instance = nullptr;
pthread_once_t pool_once = PTHREAD_ONCE_INIT;

void new_pool() {
  pool_instance = new Pool;
}

void child_after_fork() {
  new_pool();
  inside_task = false;
}

Pool& pool() {
  pthread_once(&pool_once, [] {
    new_pool();
    pthread_atfork(nullptr, nullptr, child_after_fork);
  });
  return *pool_instance;
}

struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  void release() {
    if (data) munmap(data, bytes);
    data = nullptr, bytes = 0;
  }
};

struct Blocks {
  Block slots[static_cast<int>(WorkspaceSlot::kCount)];
  ~Blocks() {
    for (auto& slot : slots) slot.release();
  }
};
thread_local Blocks blocks;

}  // namespace

void parallel_for(int num_threads, int64_t num_tasks, TaskFn fn, void* context) {
  if (num_tasks <= 0) return;
  if (num_threads > num_tasks) num_threads = static_cast<int>(num_tasks);
  if (num_threads <= 1 || inside_task) {
    FloatState ieee;
    for (int64_t task = 0; task < num_tasks; ++task) fn(context, task, 0);
    return;
  }
  pool().run(num_threads, num_tasks, fn, context);
}

int pool_size() {
  return pool().size();
}

void* workspace(WorkspaceSlot slot, int64_t bytes) {
  Block& block = blocks.slots[static_cast<int>(slot)];
  size_t wanted = (static_cast<size_t>(bytes) + (size_t{1} << 21)) & ~((size_t{1} << 21) - 1);
  if (block.bytes < wanted) {
    block.release();
    void* data = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
    madvise(data, wanted, MADV_HUGEPAGE);
    block.data = data, block.bytes = wanted;
  }
  return block.data;
}

void release_workspaces() {
  for (auto& slot : blocks.slots) slot.release();
}

}  // namespace mxmoe::host
