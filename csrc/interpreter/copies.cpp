// TMA and bulk copies: asynchronous, through the async proxy, finished when the scheduler says so.
#include "interpreter/machine.h"

namespace mxmoe::interpreter {
// One copy global -> shared: `read` gives the bytes when the copy runs, having checked where they come from.
void Warp::copy_in(const Op& op, barrier& b, uint32_t to, std::function<std::vector<std::byte>(uint32_t record)> read) {
  const uint32_t component = grid.copy_component(w), step = grid.next_copy_step(component);
  const uint32_t address = grid.shared_offset(w, op, &b, sizeof b);
  const Issued issued(w);
  grid.launch_copy([this, op, address, to, component, step, issued, read = std::move(read)] {
    const auto bytes = read(grid.record(w, op, Proxy::kAsync, false, component, step));
    const uint32_t record = grid.record(w, op, Proxy::kAsync, true, component, step);
    grid.touch_shared(w, op, record, issued.view(), to, bytes.size());
    std::memcpy(w.cta->shared + to, bytes.data(), bytes.size());
    Barrier& state = grid.barrier(w, op, address);
    grid.touch_shared(w, op, grid.record(w, op, Proxy::kAsync, false, component, step), issued.view(), address,
                      sizeof(barrier));
    Clock done;
    done.raise(component, step);
    grid.complete_bytes(w, op, state, static_cast<int64_t>(bytes.size()), done);
  });
}

void Warp::tma_load(void* shared, const tensor_map& map, int column, int row, barrier& b, pred p, Where where) {
  const Op op = begin("tma_load", where);
  p = one_lane(op, p);
  if (op.is("column")) column += 16 / static_cast<int>(map.element_bytes);
  if (op.is("row")) ++row;
  const size_t line = size_t{map.box_columns} * map.element_bytes;
  const uint32_t to = grid.shared_offset(w, op, shared, line * map.box_rows),
                 alignment = map.swizzle == cuda::Swizzle::kNone ? 128 : 1024;
  if (map.row_bytes % 16 || reinterpret_cast<uintptr_t>(map.data) % 16 || line % 16 || to % alignment)
    grid.fail(w, op, "copy",
              "TMA needs 16-byte rows, address and box lines, and a shared address that is a multiple of " +
                  std::to_string(alignment));
  if (map.swizzle != cuda::Swizzle::kNone && line > cuda::swizzle_bytes(map.swizzle))
    grid.fail(w, op, "copy", "the box is wider than its swizzle");
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    const Issued issued(w);
    copy_in(op, b, to, [this, op, map, column, row, line, issued](uint32_t record) {
      std::vector<std::byte> box(line * map.box_rows);
      for (uint32_t r = 0; r < map.box_rows; ++r) {
        const int64_t from_row = int64_t{row} + r, first = column < 0 ? 0 : column,
                      end = int64_t{column} + map.box_columns;
        const int64_t last = end < static_cast<int64_t>(map.columns) ? end : static_cast<int64_t>(map.columns);
        if (from_row < 0 || from_row >= static_cast<int64_t>(map.rows) || last <= first) continue;
        const auto* from = static_cast<const std::byte*>(map.data) + static_cast<size_t>(from_row) * map.row_bytes;
        const size_t begin = static_cast<size_t>(first) * map.element_bytes,
                     size = static_cast<size_t>(last - first) * map.element_bytes;
        grid.touch_global(w, op, record, issued.view(), from + begin, size);
        const size_t at = r * line + static_cast<size_t>(first - column) * map.element_bytes;
        for (size_t i = 0; i < size; ++i)
          box[cuda::swizzled(map.swizzle, static_cast<uint32_t>(at + i))] = from[begin + i];
      }
      return box;
    });
  }
}

void Warp::bulk_load(void* shared, const void* global, uint32_t num_bytes, barrier& b, pred p, Where where) {
  const Op op = begin("bulk_load", where);
  p = one_lane(op, p);
  const uint32_t to = grid.shared_offset(w, op, shared, num_bytes);
  if (to % 16 || reinterpret_cast<uintptr_t>(global) % 16 || num_bytes % 16)
    grid.fail(w, op, "copy", "bulk copies go by 16 bytes");
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    const Issued issued(w);
    copy_in(op, b, to, [this, op, global, num_bytes, issued](uint32_t record) {
      grid.touch_global(w, op, record, issued.view(), global, num_bytes);
      const auto* from = static_cast<const std::byte*>(global);
      return std::vector<std::byte>(from, from + num_bytes);
    });
  }
}

void Warp::fence_proxy_async(Where where) {
  if (begin("fence.proxy.async", where).is("skip")) return;
  w.async.join(w.generic);
  grid.release(w);
}

}  // namespace mxmoe::interpreter
