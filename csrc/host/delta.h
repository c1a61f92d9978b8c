// Differences of two versions of a tensor: where elements changed and by how many steps in the order of their values.
// The format is in mxmoe/delta.py.
#pragma once
#include <cstdint>

#include "host/isa.h"

namespace mxmoe::host {

constexpr int64_t kDeltaChunk = 1 << 17;  // elements that are coded on their own: one task
constexpr int kGapEscape = 255;           // "255 unchanged elements, and more": the next byte goes on

enum class DeltaOrder : uint8_t { kPlain, kSignMagnitude, kNibbles };

struct DeltaArgs {
  const void* before;
  const void* after;  // of diff
  void* target;       // of apply
  int64_t numel;
  int width;  // bytes of an element: 1, 2 or 4
  DeltaOrder order;
  int32_t* changes;             // (chunks): changed elements
  int32_t* gap_bytes;           // (chunks)
  const int64_t* first_change;  // (chunks + 1): sums of the two above
  const int64_t* first_gap;
  uint8_t* gaps;   // (first_gap[chunks])
  uint8_t* steps;  // (width, first_change[chunks]): byte planes of the steps, lowest first
  bool backwards;  // apply: from after to before
};

}  // namespace mxmoe::host

MXMOE_FOR_EACH_ISA(void delta_count(const DeltaArgs& args, int threads);  // writes changes and gap_bytes
                   void delta_encode(const DeltaArgs& args, int threads);
                   bool delta_valid(const DeltaArgs& args, int threads);  // every change lies inside its chunk
                   void delta_apply(const DeltaArgs& args, int threads);)
