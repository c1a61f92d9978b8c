// For every byte (or tensor-memory word) who wrote it last and who has read it since, so that two accesses of which one
// writes and which nothing orders are found whenever both occur, whatever the schedule made of them.
//
// Proxies: ordinary loads and stores go through the generic proxy; TMA, bulk copies and the tensor core's reads of
// shared memory through the async proxy; tensor memory is the tensor proxy's. A generic write is visible to the async
// proxy only past a fence.proxy.async; tcgen05 instructions of two warps are ordered only past both tcgen05 fences.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "interpreter/clock.h"

namespace mxmoe::interpreter {

enum class Proxy : uint8_t { kGeneric, kAsync, kTensor };

// One instruction's access by one component.
struct Access {
  uint32_t component, step;
  Proxy proxy;
  bool write;
  uint32_t site;     // see sites.h
  const void* warp;  // that issued it
  bool strong;       // a flag's: two of them do not race
};

// What an access may take for over: by the generic proxy's order, what the async proxy sees of generic writes, and the
// order of tcgen05 instructions.
struct View {
  const Clock *generic, *async, *tensor;
};

bool is_ordered(const Access& before, const Access& now, const View& view);

class Shadow {
 public:
  explicit Shadow(size_t num_cells = 0, bool initialised = false) : cells_(num_cells), initialised_(initialised) {}

  struct Conflict {
    enum Kind { kNone, kRace, kUninitialised } kind = kNone;
    size_t cell = 0;
    uint32_t other = 0;  // record of the earlier access of a race
  };

  // The access `records[record]` to cells [first, first + count); the first conflict found.
  Conflict access(const std::vector<Access>& records, uint32_t record, const View& view, size_t first, size_t count);

 private:
  struct Cell {
    uint32_t writer = 0;   // record; 0: never written
    uint32_t readers = 0;  // 0: none; top bit: the one record in the rest; else an index into sets_
  };
  static constexpr uint32_t kSingle = 0x80000000u;

  uint32_t with_reader(const std::vector<Access>& records, uint32_t readers, uint32_t record, const View& view);
  template <typename F>
  void each_reader(uint32_t readers, F f) const;

  std::vector<Cell> cells_;
  bool initialised_;
  std::vector<std::vector<uint32_t>> sets_;
  // What the last record's access made of one history: most cells that it goes on to have the same.
  uint32_t record_ = 0;
  Cell before_, after_;
};

}  // namespace mxmoe::interpreter
