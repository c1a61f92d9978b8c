#include "host/memory.h"

#include <sys/mman.h>

#include <cstdio>
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

class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(int64_t bytes) {
    std::snprintf(text_, sizeof(text_), "no memory for a result of %lld bytes", static_cast<long long>(bytes));
  }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[64];
};

void* map(int64_t bytes) {
  void* data = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw OutOfMemory(bytes);
  const auto start = reinterpret_cast<intptr_t>(data), aligned = (start + kHugePage - 1) & -kHugePage;
  if (aligned > start) munmap(data, aligned - start);
  munmap(reinterpret_cast<void*>(aligned + bytes), start + kHugePage - aligned);
#if defined(MADV_HUGEPAGE)
  madvise(reinterpret_cast<void*>(aligned), bytes, MADV_HUGEPAGE);
#endif
  return reinterpret_cast<void*>(aligned);
}

struct Kept {
  char* data;
  int64_t size;
};

// What is in use and what is kept together never exceed the most that was in use at once and an eighth. A block that no
// kept one can serve is put together from the pages of the oldest of them, as far as that bound forbids fresh ones:
// moving a huge page costs a thousandth of clearing it.
class Pool {
 public:
  void* take(int64_t& size) {
    std::lock_guard<std::mutex> lock(mutex_);
    size = (size + kHugePage - 1) & -kHugePage;
    void* const kept = reuse(size);
    void* const data = kept ? kept : map(size);  // before anything is counted: it may throw
    stats_.in_use += size;
    if (stats_.in_use > stats_.peak) stats_.peak = stats_.in_use;
    if (!kept) {
      const int64_t surplus = stats_.in_use + stats_.kept - bound();
      for (int64_t at = 0; at < size && at < surplus; at += kHugePage) {
        if (move_oldest_page(static_cast<char*>(data) + at)) continue;
        stats_.in_use -= size;
        munmap(data, size);
        throw OutOfMemory(size);
      }
    }
    MXMOE_UNPOISON(data, size);
    return data;
  }

  void put(void* data, int64_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.in_use -= size, stats_.kept += size;
    kept_.push_back({static_cast<char*>(data), size});
    while (stats_.kept > 0 && stats_.in_use + stats_.kept > bound()) drop_oldest_page();
  }

  void release() {
    std::lock_guard<std::mutex> lock(mutex_);
    while (stats_.kept > 0) drop_oldest_page();
    stats_.peak = stats_.in_use;
  }

  MemoryStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

 private:
  int64_t bound() const { return stats_.peak + stats_.peak / 8; }

  // The smallest kept block that is large enough and wastes at most a quarter, else null.
  void* reuse(int64_t& size) {
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it)
      if (it->size >= size && it->size <= size + size / 4 && (best == kept_.end() || it->size <= best->size)) best = it;
    if (best == kept_.end()) return nullptr;
    void* data = best->data;
    size = best->size;
    stats_.kept -= size;
    kept_.erase(best);
    return data;
  }

  char* oldest_page() {
    Kept& oldest = kept_.front();
    oldest.size -= kHugePage, stats_.kept -= kHugePage;
    char* page = oldest.data + oldest.size;
    if (oldest.size == 0) kept_.pop_front();
    MXMOE_UNPOISON(page, kHugePage);
    return page;
  }

  void drop_oldest_page() { munmap(oldest_page(), kHugePage); }

  // Where the system cannot move it (too many mappings), the page goes and a fresh one stays. False: nor that one.
  bool move_oldest_page(char* to) {
    char* page = oldest_page();
    bool present = true;
#if defined(MREMAP_FIXED)
    if (mremap(page, kHugePage, kHugePage, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED) return true;
    present = mmap(to, kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
#endif
    munmap(page, kHugePage);
    return present;
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
