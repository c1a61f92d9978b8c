// The rows of a (B, R, L) array cut into tiles that never cross a group: what the tasks of quantize and dequantize are
// made of.
#pragma once
#include <cstdint>
#include <vector>

namespace mxmoe::host {

struct RowTile {
  int64_t batch;        // b
  int64_t row;          // first row of the source
  int64_t rows;         // rows of the source; 0 for a tile of padding
  int64_t padded_row;   // where they start along the contraction of a column copy
  int64_t padded_rows;  // rows to write there: `rows`, or 128 where groups are padded
  int64_t group;        // b, or the index into offs
  int64_t logical_row;  // first row, counted from the group's first (with offs) or over the whole array
  bool past_the_end;    // rows past offs[-1]: not read, zero in a row copy, absent from a column copy
};

// `height` divides 128; offs (E,) cumulative ends or nullptr.
std::vector<RowTile> row_tiles(int64_t batch, int64_t rows, const int32_t* offs, int64_t num_groups, int64_t height);

}  // namespace mxmoe::host
