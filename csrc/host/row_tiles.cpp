#include "host/row_tiles.h"

#include <algorithm>

#include "layout.h"

namespace mxmoe::host {

std::vector<RowTile> row_tiles(int64_t batch, int64_t rows, const int32_t* offs, int64_t num_groups, int64_t height) {
  std::vector<RowTile> tiles;
  if (!offs) {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t r = 0; r < rows; r += height) {
        int64_t n = std::min(height, rows - r);
        tiles.push_back({b, r, n, r, n, b, b * rows + r, false});
      }
    return tiles;
  }
  int64_t start = 0, padded_start = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t length = offs[g] - start, padded_length = round_up(length, kGroupAlignment);
    for (int64_t r = 0; r < padded_length; r += height) {
      int64_t n = std::clamp<int64_t>(length - r, 0, height);
      tiles.push_back({0, start + r, n, padded_start + r, height, g, r, false});
    }
    start = offs[g], padded_start += padded_length;
  }
  for (int64_t p = padded_start; p < padded_rows(rows, num_groups); p += height)
    tiles.push_back({0, rows, 0, p, height, 0, 0, false});
  for (int64_t r = start; r < rows; r += height) tiles.push_back({0, r, std::min(height, rows - r), 0, 0, 0, 0, true});
  return tiles;
}

}  // namespace mxmoe::host
