#include "host/memory.h"

#include <sys/mman.h>

#include <list>
#include <mutex>
#include <new>

#if defined(__SANITIZE_ADDRESS__)  // told what of a block may be touched
#include <sanitizer/asan_interface.h>
#define MXMOE_POISON(data, bytes) ASAN_POISON_MEMORY_REGION(data, bytes)
#define MXMOE_UNPOISON(data, bytes) ASAN_UNPOISON_MEMORY_REGION(data, bytes)
#else
#define MXMOE_POISON(data, bytes)
#define MXMOE_UNPOISON(data, bytes)
#endif

namespace mxmoe::host {
namespace {

constexpr int64_t kHugePage = int64_t{1} << 21;

void* map(int64_t bytes) {
  void* data = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  const auto start = reinterpret_cast<intptr_t>(data), aligned = (start + kHugePage - 1) & -kHugePage;
  if (aligned > start) munmap(data, aligned - start);
  munmap(reinterpret_cast<void*>(aligned + bytes), start + kHugePage - aligned);
#if defined(MADV_HUGEPAGE)
  madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);
#endif
  return reinterpret_cast<void*>(aligned);
}

struct Kept {
  void* data;
  int64_t size;
};

// What is in use and what is kept together never exceed the most that was in use at once: a process holds no more
// memory than its own largest moment, and the oldest block goes first.
class Pool {
 public:
  void* take(int64_t& size) {
    std::lock_guard<std::mutex> lock(mutex_);
    size = (size + kHugePage - 1) & -kHugePage;
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it)
      if (it->size >= size && it->size <= size + size / 4 && (best == kept_.end() || it->size <= best->size)) best = it;
    void* data = nullptr;
    if (best != kept_.end()) {
      data = best->data, size = best->size;
      stats_.kept -= size;
      kept_.erase(best);
    } else {
      trim(bound() - stats_.in_use - size);
      data = map(size);
    }
    MXMOE_UNPOISON(data, size);
    stats_.in_use += size;
    if (stats_.in_use > stats_.peak) stats_.peak = stats_.in_use;
    return data;
  }

  void put(void* data, int64_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.in_use -= size, stats_.kept += size;
    kept_.push_back({data, size});
    trim(bound() - stats_.in_use);
  }

  void release() {
    std::lock_guard<std::mutex> lock(mutex_);
    trim(0);
    stats_.peak = stats_.in_use;
  }

  MemoryStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

 private:
  int64_t bound() const { return stats_.peak + stats_.peak / 8; }

  void trim(int64_t allowed) {
    while (!kept_.empty() && stats_.kept > allowed) {
      MXMOE_UNPOISON(kept_.front().data, kept_.front().size);
      munmap(kept_.front().data, kept_.front().size);
      stats_.kept -= kept_.front().size;
      kept_.pop_front();
    }
  }

  std::mutex mutex_;
  std::list<Kept> kept_;  // oldest first
  MemoryStats stats_{};
};

Pool& pool() {
  static Pool* const instance = new Pool;  // never destroyed: tensors may outlive static destructors
  return *instance;
}

}  // namespace

Block::Block(int64_t bytes) : size_(bytes) {
  data_ = pool().take(size_);
  MXMOE_POISON(static_cast<char*>(data_) + bytes, size_ - bytes);
}

Block::~Block() {
  MXMOE_POISON(data_, size_);
  pool().put(data_, size_);
}

MemoryStats memory_stats() {
  return pool().stats();
}

void release_kept_memory() {
  pool().release();
}

}  // namespace mxmoe::host
