#include "host/swizzle_scales.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "host/threads.h"
#include "layout.h"

namespace mxmoe::host {
namespace {

// One row of tiles (128 lines) of a blocked matrix: plain lines [line, line + lines) x blocks [block, block + blocks).
struct Strip {
  int64_t line, lines, block, blocks;
  int64_t offset;  // of its first byte in the blocked array
};

void add_matrix(std::vector<Strip>& strips, int64_t line, int64_t lines, int64_t block, int64_t blocks,
                int64_t offset) {
  for (int64_t l = 0; l < lines; l += kScaleTileRows)
    strips.push_back(
        {line + l, std::min(kScaleTileRows, lines - l), block, blocks, offset + blocked_offset(l, 0, blocks)});
}

std::vector<Strip> strips_of(const SwizzleArgs& a) {
  std::vector<Strip> strips;
  if (!a.offs) add_matrix(strips, 0, a.lines, 0, a.blocks, 0);
  int64_t start = 0, padded_start = 0;
  for (int64_t g = 0; a.offs && g < a.num_groups; ++g) {
    const int64_t rows = a.offs[g] - start, padded = round_up(rows, kGroupAlignment);
    if (a.column) {
      const int64_t offset = round_up(a.lines, kScaleTileRows) * padded_start / a.block;
      add_matrix(strips, 0, a.lines, padded_start / a.block, padded / a.block, offset);
    } else {
      add_matrix(strips, start, rows, 0, a.blocks, blocked_offset(padded_start, 0, a.blocks));
    }
    start = a.offs[g], padded_start += padded;
  }
  return strips;
}

void copy_strip(const SwizzleArgs& a, const Strip& s, uint8_t* plain, uint8_t* blocked) {
  for (int64_t l = 0; l < s.lines; ++l) {
    uint8_t* line = plain + (s.line + l) * a.blocks + s.block;
    uint8_t* to = blocked + s.offset + blocked_offset(l, 0, s.blocks);
    for (int64_t k = 0; k < s.blocks; k += kScaleTileBlocks, to += kScaleTileBytes) {
      const int64_t count = std::min(kScaleTileBlocks, s.blocks - k);
      if (a.inverse) {
        memcpy(line + k, to, count);
      } else {
        memcpy(to, line + k, count);
      }
    }
  }
}

}  // namespace

void swizzle_scales(const SwizzleArgs& a, int threads) {
  const std::vector<Strip> strips = strips_of(a);
  const int64_t plain_bytes = a.lines * a.blocks, num_strips = static_cast<int64_t>(strips.size());
  if (a.inverse) {
    memset(a.plain, 0, a.batch * plain_bytes);
  } else {
    memset(a.blocked, 0, a.batch * a.bytes);
  }
  parallel(threads, a.batch * num_strips, [&](int64_t task, int) {
    const int64_t b = task / num_strips;
    copy_strip(a, strips[task % num_strips], a.plain + b * plain_bytes, a.blocked + b * a.bytes);
  });
}

}  // namespace mxmoe::host
