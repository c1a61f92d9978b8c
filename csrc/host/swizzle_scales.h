// swizzle_scales: plain (line, block) scale bytes <-> the blocked ("128x4") layout. docs/layouts.md draws it.
#pragma once
#include <cstdint>

namespace mxmoe::host {

struct SwizzleArgs {
  uint8_t* plain;    // (B, lines, blocks)
  uint8_t* blocked;  // (B, bytes)
  int64_t batch, lines, blocks, bytes;
  const int32_t* offs;  // (num_groups,) or nullptr
  int64_t num_groups;
  bool column;    // of the copy: its groups lie along the blocks, a row copy's along the lines
  int64_t block;  // elements per block
  bool inverse;   // blocked -> plain
};

void swizzle_scales(const SwizzleArgs& args, int threads);

}  // namespace mxmoe::host
