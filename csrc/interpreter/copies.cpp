// TMA and bulk copies: asynchronous, through the async proxy, finished when the scheduler says so.
#include "interpreter/machine.h"

namespace mxmoe::interpreter {
namespace {

// The part of a box that is inside its matrix, line by line: f(byte of the matrix, byte of the box, number of bytes).
template <typename F>
void each_line(const cuda::TensorMapArgs& map, int column, int row, F f) {
  const int64_t first = std::max(column, 0),
                last = std::min(int64_t{column} + map.box_columns, static_cast<int64_t>(map.columns));
  for (int64_t r = 0; r < map.box_rows; ++r) {
    const int64_t from_row = row + r;
    if (from_row < 0 || from_row >= static_cast<int64_t>(map.rows) || last <= first) continue;
    f(static_cast<size_t>(from_row) * map.row_bytes + static_cast<size_t>(first) * map.element_bytes,
      static_cast<size_t>(r * map.box_columns + first - column) * map.element_bytes,
      static_cast<size_t>(last - first) * map.element_bytes);
  }
}

float element_value(DType type, const std::byte* p) {
  uint32_t bits = 0;
  std::memcpy(&bits, p, type == DType::kF32 ? 4 : 2);
  if (type == DType::kF16) return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(bits)));
  return __builtin_bit_cast(float, type == DType::kBF16 ? bits << 16 : bits);
}

// *p += x, rounded once.
void add_element(DType type, std::byte* p, const std::byte* x) {
  const float sum = element_value(type, p) + element_value(type, x);
  const auto bits = __builtin_bit_cast(uint32_t, sum);
  const auto half = static_cast<_Float16>(sum);
  const auto rounded = static_cast<uint16_t>(sum == sum ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fffu);
  if (type == DType::kF32) std::memcpy(p, &bits, 4);
  if (type == DType::kF16) std::memcpy(p, &half, 2);
  if (type == DType::kBF16) std::memcpy(p, &rounded, 2);
}

}  // namespace

// One copy global -> shared: `read` gives the bytes when the copy runs, having checked where they come from.
void Warp::copy_in(const Op& op, uint32_t barrier_address, uint32_t to, std::function<Bytes(uint32_t record)> read) {
  const uint32_t component = grid.copy_component(w), step = grid.next_copy_step(component);
  const auto [cta, address] = grid.in_cluster(w, op, barrier_address);
  const Issued issued(w);
  grid.launch_copy([this, op, cta, address, to, component, step, issued, read = std::move(read)] {
    const auto bytes = read(grid.record(w, op, Proxy::kAsync, false, component, step));
    const uint32_t record = grid.record(w, op, Proxy::kAsync, true, component, step);
    grid.touch_shared(w, op, record, issued.view(), to, bytes.size());
    std::memcpy(w.cta->shared + to, bytes.data(), bytes.size());
    Barrier& state = grid.barrier_of(*cta, w, op, address);
    grid.touch_shared_of(*cta, w, op, grid.record(w, op, Proxy::kAsync, false, component, step), issued.view(), address,
                         sizeof(barrier));
    Clock done;
    done.raise(component, step);
    grid.complete_bytes(w, op, state, static_cast<int64_t>(bytes.size()), done);
  });
}

void Warp::check_box(const Op& op, const tensor_map& map, uint32_t shared_address) {
  const size_t line = size_t{map.box_columns} * map.element_bytes;
  const uint32_t alignment = map.swizzle == cuda::Swizzle::kNone ? 128 : 1024;
  if (!map.rows || !map.columns) grid.fail(w, op, "copy", "TMA has no descriptor of an empty matrix");
  if (map.row_bytes % 16 || reinterpret_cast<uintptr_t>(map.data) % 16 || line % 16 || shared_address % alignment)
    grid.fail(w, op, "copy",
              "TMA needs 16-byte rows, address and box lines, and a shared address that is a multiple of " +
                  std::to_string(alignment));
  if (map.swizzle != cuda::Swizzle::kNone && line > cuda::swizzle_bytes(map.swizzle))
    grid.fail(w, op, "copy", "the box is wider than its swizzle");
}

void Warp::load_box(const char* name, void* shared, const tensor_map& map, int column, int row,
                    uint32_t barrier_address, pred p, Where where) {
  const Op op = begin(name, where);
  p = one_lane(op, p);
  if (op.is("column")) column += 16 / static_cast<int>(map.element_bytes);
  if (op.is("row")) ++row;
  const size_t num_bytes = size_t{map.box_columns} * map.element_bytes * map.box_rows;
  const uint32_t to = grid.shared_offset(w, op, shared, num_bytes);
  check_box(op, map, to);
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    const Issued issued(w);
    copy_in(op, barrier_address, to, [this, op, map, column, row, num_bytes, issued](uint32_t record) {
      Bytes box(num_bytes);
      const auto* data = static_cast<const std::byte*>(map.data);
      each_line(map, column, row, [&](size_t from, size_t at, size_t size) {
        grid.touch_global(w, op, record, issued.global_view(), data + from, size);
        for (size_t j = 0; j < size; ++j)
          box[cuda::swizzled(map.swizzle, static_cast<uint32_t>(at + j))] = data[from + j];
      });
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
    copy_in(op, shared_address(&b), to, [this, op, global, num_bytes, issued](uint32_t record) {
      grid.touch_global(w, op, record, issued.global_view(), global, num_bytes);
      const auto* from = static_cast<const std::byte*>(global);
      return Bytes(from, from + num_bytes);
    });
  }
}

void Warp::fence_proxy_async(Where where) {
  if (begin("fence.proxy.async", where).is("skip")) return;
  w.async.join(w.generic);
  grid.release(w);
}

void Warp::fence_proxy_async_global(Where where) {
  if (begin("fence.proxy.async.global", where).is("skip")) return;
  w.async_global.join(w.generic);
}

// --- stores: shared memory is read at one time, global memory written at a later one

void Warp::copy_out(const Op& op, std::function<Bytes(uint32_t record)> read,
                    std::function<void(uint32_t component, uint32_t step, const Bytes&)> write) {
  if (bulk_groups_.empty() || bulk_groups_.back().committed) bulk_groups_.emplace_back();
  BulkGroup& group = bulk_groups_.back();
  ++group.reading, ++group.writing, ++w.cta->running->stores;
  const uint32_t component = grid.copy_component(w);
  const uint32_t reads = grid.next_copy_step(component), writes = grid.next_copy_step(component);
  group.reads.raise(component, reads), group.writes.raise(component, writes);
  grid.launch_copy([=, this, &group, read = std::move(read), write = std::move(write)] {
    Bytes bytes = read(grid.record(w, op, Proxy::kAsync, false, component, reads));
    --group.reading;
    grid.launch_copy([=, this, &group, bytes = std::move(bytes)] {
      write(component, writes, bytes);
      --group.writing, --w.cta->running->stores;
      w.cta->running->over.raise(component, writes);
    });
  });
}

void Warp::store_box(const char* name, const tensor_map& map, int column, int row, const void* shared, bool add, pred p,
                     Where where) {
  const Op op = begin(name, where);
  p = one_lane(op, p);
  if (op.is("column")) column += 16 / static_cast<int>(map.element_bytes);
  if (op.is("row")) ++row;
  const size_t num_bytes = size_t{map.box_columns} * map.element_bytes * map.box_rows;
  const uint32_t from = grid.shared_offset(w, op, shared, num_bytes);
  check_box(op, map, from);
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    const Issued issued(w);
    const auto read = [this, op, map, column, row, from, num_bytes, issued](uint32_t record) {
      Bytes box(num_bytes);
      each_line(map, column, row, [&](size_t, size_t at, size_t size) {
        for (size_t j = at; j < at + size; j += 16) {
          const size_t chunk = std::min<size_t>(16, at + size - j);
          const uint32_t source = from + cuda::swizzled(map.swizzle, static_cast<uint32_t>(j));
          grid.touch_shared(w, op, record, issued.view(), source, chunk);
          std::memcpy(&box[j], w.cta->shared + source, chunk);
        }
      });
      return box;
    };
    copy_out(op, read, [this, op, map, column, row, add, issued](uint32_t component, uint32_t step, const Bytes& box) {
      auto* data = static_cast<std::byte*>(map.data);
      const uint32_t reads = grid.record(w, op, Proxy::kAsync, false, component, step);
      const uint32_t writes = grid.record(w, op, Proxy::kAsync, true, component, step);
      each_line(map, column, row, [&](size_t to, size_t at, size_t size) {
        if (add) grid.touch_global(w, op, reads, issued.global_view(), data + to, size);
        grid.touch_global(w, op, writes, issued.global_view(), data + to, size);
        if (!add) std::memcpy(data + to, &box[at], size);
        for (size_t j = 0; add && j < size; j += map.element_bytes) add_element(map.dtype, data + to + j, &box[at + j]);
      });
    });
  }
}

void Warp::bulk_store(void* global, const void* shared, uint32_t num_bytes, pred p, Where where) {
  const Op op = begin("bulk_store", where);
  p = one_lane(op, p);
  const uint32_t from = grid.shared_offset(w, op, shared, num_bytes);
  if (from % 16 || reinterpret_cast<uintptr_t>(global) % 16 || num_bytes % 16)
    grid.fail(w, op, "copy", "bulk copies go by 16 bytes");
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    const Issued issued(w);
    const auto read = [this, op, from, num_bytes, issued](uint32_t record) {
      grid.touch_shared(w, op, record, issued.view(), from, num_bytes);
      return Bytes(w.cta->shared + from, w.cta->shared + from + num_bytes);
    };
    copy_out(op, read, [this, op, global, num_bytes, issued](uint32_t component, uint32_t step, const Bytes& bytes) {
      const uint32_t record = grid.record(w, op, Proxy::kAsync, true, component, step);
      grid.touch_global(w, op, record, issued.global_view(), global, num_bytes);
      std::memcpy(global, bytes.data(), num_bytes);
    });
  }
}

void Warp::bulk_commit_group(Where where) {
  const Op op = begin("bulk_commit_group", where);
  if (op.is("skip")) return;
  if (bulk_groups_.empty() || bulk_groups_.back().committed) bulk_groups_.emplace_back();
  bulk_groups_.back().committed = true;
}

// Until all but the last `pending` committed groups have read shared memory, or have written as well.
void Warp::wait_for_groups(const char* name, size_t pending, bool read, Where where) {
  const Op op = begin(name, where);
  if (op.is("skip")) return;
  if (op.is("one more")) ++pending;
  size_t committed = bulk_groups_.size();
  if (committed && !bulk_groups_.back().committed) --committed;
  const size_t num_groups = committed > pending ? committed - pending : 0;
  block(
      op,
      [this, num_groups, read] {
        for (size_t i = 0; i < num_groups; ++i)
          if (read ? bulk_groups_[i].reading : bulk_groups_[i].writing) return false;
        return true;
      },
      [num_groups] { return "for " + std::to_string(num_groups) + " groups of stores"; });
  for (size_t i = 0; i < num_groups; ++i) {
    BulkGroup& group = bulk_groups_[i];
    group.read = true;
    w.generic.join(group.reads), w.async.join(group.reads);
    if (!read) w.generic.join(group.writes), w.async.join(group.writes);
  }
  for (size_t i = 0; i < num_groups && !read; ++i) bulk_groups_.pop_front();
}

}  // namespace mxmoe::interpreter
