// Memory that is kept: fresh pages cost ten times what writing to them costs, so large blocks go back to a pool instead
// of to the system. Blocks are whole huge pages, where the system grants them.
#pragma once
#include <cstdint>

namespace mxmoe::host {

// A block of the pool, for as long as it lives. Contents are whatever its last owner left.
class Block {
 public:
  explicit Block(int64_t bytes);  // std::bad_alloc
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* data() const { return data_; }
  int64_t size() const { return size_; }  // bytes, at least what was asked for

 private:
  void* data_;
  int64_t size_;
};

struct MemoryStats {
  int64_t in_use, kept,
      peak;  // bytes: of living blocks, of blocks waiting for the next, and the most ever in use at once
};
MemoryStats memory_stats();

// Gives kept blocks back to the system; the bound on what is kept starts anew from what is in use.
void release_kept_memory();

}  // namespace mxmoe::host
