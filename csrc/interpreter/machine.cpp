// The warp's own instructions: loads, stores, conversions, barriers.
#include "interpreter/machine.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "formats.h"

namespace mxmoe::interpreter {
namespace {

template <typename E>
uint32_t encode_signed(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 31 << (E::kBits - 1);
  return sign | (magnitude > kInfBits ? E::kPoison : encode_nearest<E>(magnitude));
}

uint32_t bf16_bits(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if ((bits & 0x7fffffffu) > kInfBits) return 0x7fff;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

uint32_t f16_bits(float x) {
  const auto h = static_cast<_Float16>(x);
  return __builtin_bit_cast(uint16_t, h);
}

template <typename F>
Warp::u32 pairs(Warp::lane<float> low, Warp::lane<float> high, int bits, F f) {
  Warp::u32 r;
  for (int i = 0; i < kLanes; ++i) r[i] = f(low[i]) | f(high[i]) << bits;
  return r;
}

}  // namespace

Warp::lane<float> Warp::half_to_float(u32 h) const {
  lane<float> r;
  for (int i = 0; i < kLanes; ++i) r[i] = static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(h[i])));
  return r;
}
Warp::lane<float> Warp::fma(lane<float> a, lane<float> b, lane<float> c) const {
  lane<float> r;
  for (int i = 0; i < kLanes; ++i) r[i] = std::fmaf(a[i], b[i], c[i]);
  return r;
}
Warp::u32 Warp::cvt_f16x2_e4m3x2(u32 codes) const {
  const auto half = [](uint32_t code) {
    const uint32_t magnitude = __builtin_bit_cast(uint32_t, decode_magnitude<E4M3>(code & 0x7fu));
    return f16_bits(__builtin_bit_cast(float, magnitude | (code & 0x80u) << 24));
  };
  u32 r;
  for (int i = 0; i < kLanes; ++i) r[i] = half(codes[i] & 255u) | half(codes[i] >> 8 & 255u) << 16;
  return r;
}
Warp::u32 Warp::cvt_e4m3x2(lane<float> low, lane<float> high) const {
  return pairs(low, high, 8, encode_signed<E4M3>);
}
Warp::u32 Warp::cvt_e5m2x2(lane<float> low, lane<float> high) const {
  return pairs(low, high, 8, encode_signed<E5M2>);
}
Warp::u32 Warp::cvt_bf16x2(lane<float> low, lane<float> high) const {
  return pairs(low, high, 16, bf16_bits);
}
Warp::u32 Warp::cvt_f16x2(lane<float> low, lane<float> high) const {
  return pairs(low, high, 16, f16_bits);
}
Warp::u32 Warp::mul_bf16x2(u32 a, u32 b) const {
  const auto product = [](uint32_t x, uint32_t y) {  // of the upper halves; exact in FP32 or rounded twice to the same
    return bf16_bits(__builtin_bit_cast(float, x & 0xffff0000u) * __builtin_bit_cast(float, y & 0xffff0000u));
  };
  u32 r;
  for (int i = 0; i < kLanes; ++i) r[i] = product(a[i] << 16, b[i] << 16) | product(a[i], b[i]) << 16;
  return r;
}

Warp::u32 Warp::match_any(u32 x) const {
  u32 r{};
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) r[i] |= uint32_t{x[i] == x[j]} << j;
  return r;
}
Warp::u32 Warp::popc(u32 x) const {
  u32 r;
  for (int i = 0; i < kLanes; ++i) r[i] = static_cast<uint32_t>(std::popcount(x[i]));
  return r;
}
uint32_t Warp::redux_max(u32 x) const {
  uint32_t r = x[0];
  for (int i = 1; i < kLanes; ++i) r = std::max<uint32_t>(r, x[i]);
  return r;
}
uint32_t Warp::redux_min(u32 x) const {
  uint32_t r = x[0];
  for (int i = 1; i < kLanes; ++i) r = std::min<uint32_t>(r, x[i]);
  return r;
}

Warp::pred Warp::active(const Op& op, pred p) const {
  if (any(!p)) grid.mark(op, "all lanes");
  if (op.is("all lanes")) return lane_idx() >= 0;
  return op.is("skip") ? pred{} : p;
}

// Of an instruction that is always meant for one thread.
Warp::pred Warp::one_lane(const Op& op, pred p) const {
  p = active(op, p);
  int count = 0;
  for (int i = 0; i < kLanes; ++i) count += p[i] != 0;
  if (count > 1)
    grid.fail(w, op, "copy", "issued by " + std::to_string(count) + " lanes, each of which does all of it");
  return p;
}

// --- memory

void Warp::load_global(void* to, const void* base, lane<int> offset, pred p, size_t num_bytes, size_t pitch,
                       const char* name, Where where, bool cached) {
  const Op op = begin(name, where);
  p = active(op, p);
  const uint32_t record = grid.record(w, op, Proxy::kGeneric, false, w.component, w.step);
  const Clock& before = w.cta->running->before;
  const View view = cached ? View{&before, &before, &before} : w.view();
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    const auto* from = static_cast<const std::byte*>(base) + offset[i];
    if (reinterpret_cast<uintptr_t>(from) % num_bytes) grid.fail(w, op, "out of bounds", "misaligned address");
    grid.touch_global(w, op, record, view, from, num_bytes);
    std::memcpy(static_cast<std::byte*>(to) + static_cast<size_t>(i) * pitch, from, num_bytes);
  }
}

void Warp::store_global(void* base, lane<int> offset, const void* from, pred p, size_t num_bytes, const char* name,
                        Where where) {
  const Op op = begin(name, where);
  p = active(op, p);
  const uint32_t record = grid.record(w, op, Proxy::kGeneric, true, w.component, w.step);
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    auto* to = static_cast<std::byte*>(base) + offset[i];
    if (reinterpret_cast<uintptr_t>(to) % num_bytes) grid.fail(w, op, "out of bounds", "misaligned address");
    grid.touch_global(w, op, record, w.view(), to, num_bytes);
    std::memcpy(to, static_cast<const std::byte*>(from) + static_cast<size_t>(i) * num_bytes, num_bytes);
  }
}

void Warp::load_shared(void* to, u32 address, size_t num_bytes, const char* name, Where where) {
  const Op op = begin(name, where);
  const uint32_t record = grid.record(w, op, Proxy::kGeneric, false, w.component, w.step);
  for (int i = 0; i < kLanes; ++i) {
    if (address[i] % num_bytes) grid.fail(w, op, "out of bounds", "misaligned address");
    grid.touch_shared(w, op, record, w.view(), address[i], num_bytes);
    std::memcpy(static_cast<std::byte*>(to) + static_cast<size_t>(i) * num_bytes, w.cta->shared + address[i],
                num_bytes);
  }
}

void Warp::store_shared(u32 address, const void* from, pred p, size_t num_bytes, size_t pitch, const char* name,
                        Where where) {
  const Op op = begin(name, where);
  p = active(op, p);
  const uint32_t record = grid.record(w, op, Proxy::kGeneric, true, w.component, w.step);
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    if (address[i] % num_bytes) grid.fail(w, op, "out of bounds", "misaligned address");
    grid.touch_shared(w, op, record, w.view(), address[i], num_bytes);
    std::memcpy(w.cta->shared + address[i], static_cast<const std::byte*>(from) + static_cast<size_t>(i) * pitch,
                num_bytes);
  }
}

uint32_t Warp::ld_shared_uniform(uint32_t address, Where where) {
  uint32_t words[kLanes];
  load_shared(words, u32{} + address, 4, "ld.shared", where);
  return words[0];
}

// --- barriers

void Warp::block(const Op& op, std::function<bool()> ready, std::function<std::string()> text) {
  if (ready()) return;
  w.wait = {op.site, std::move(ready), std::move(text)};
  grid.pause(w);
}

// The last thing a warp does.
void Warp::end() {
  for (const BulkGroup& group : bulk_groups_)
    if (!group.read)
      throw KernelError("copy", std::string(w.role) + " (warp " + std::to_string(w.idx) + ") of CTA " +
                                    std::to_string(w.cta->idx) +
                                    " ended without waiting until its stores had read shared memory");
}

void Warp::syncthreads(Where where) {
  const Op op = begin("syncthreads", where);
  if (op.is("skip")) return;
  Rendezvous& sync = w.cta->sync;
  const int64_t generation = sync.generation;
  sync.arrive(w);
  grid.release(w);
  sync.complete();
  block(op, [&sync, generation] { return sync.generation != generation; }, [] { return "in syncthreads"; });
  w.generic.join(sync.completed), w.async.join(sync.completed_async);
}

void Warp::mbarrier_init(barrier& b, int count, pred p, Where where) {
  const Op op = begin("mbarrier.init", where);
  p = active(op, p);
  if (op.is("count")) ++count;
  const uint32_t address = grid.shared_offset(w, op, &b, sizeof b);
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    if (w.cta->barriers.count(address)) grid.fail(w, op, "barrier", "this is a barrier already");
    grid.touch_shared(w, op, grid.record(w, op, Proxy::kGeneric, true, w.component, w.step), w.view(), address,
                      sizeof b);
    Barrier fresh;
    fresh.initialised = true, fresh.count = fresh.pending = count;
    w.cta->barriers[address] = fresh;
  }
}

void Warp::fence_mbarrier_init(Where where) {
  if (begin("fence.mbarrier_init", where).is("skip")) return;
  w.async.join(w.generic);
  grid.release(w);
}

Barrier& Warp::barrier_at(const Op& op, const barrier& b) {
  const uint32_t address = grid.shared_offset(w, op, &b, sizeof b);
  Barrier& found = grid.barrier(w, op, address);
  grid.touch_shared(w, op, grid.record(w, op, Proxy::kGeneric, false, w.component, w.step), w.view(), address,
                    sizeof b);
  return found;
}

void Warp::mbarrier_arrive(barrier& b, pred p, Where where) {
  const Op op = begin("mbarrier.arrive", where);
  p = active(op, p);
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    grid.arrive(w, op, barrier_at(op, b), 1, w.generic, &w.async);
    grid.release(w);
  }
}

void Warp::mbarrier_arrive_expect_tx(barrier& b, uint32_t num_bytes, pred p, Where where) {
  const Op op = begin("mbarrier.arrive.expect_tx", where);
  p = active(op, p);
  if (op.is("more bytes")) num_bytes += 16;
  if (op.is("fewer bytes")) num_bytes -= 16;
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    Barrier& state = barrier_at(op, b);
    state.bytes += num_bytes;
    grid.arrive(w, op, state, 1, w.generic, &w.async);
    grid.release(w);
  }
}

void Warp::wait_for(const Op& op, barrier& b, uint32_t parity, bool of_cluster) {
  if (op.is("skip")) return;
  if (op.is("parity")) parity ^= 1;
  Barrier& state = barrier_at(op, b);
  const uint32_t address = grid.shared_offset(w, op, &b, sizeof b);
  block(
      op, [&state, parity] { return state.parity != parity; },
      [&state, parity, address] {
        return "for parity " + std::to_string(parity) + " of the barrier at shared address " + std::to_string(address) +
               " (phase " + std::to_string(state.phases) + ", " + std::to_string(state.pending) + " of " +
               std::to_string(state.count) + " arrivals and " + std::to_string(state.bytes) + " bytes missing)";
      });
  w.generic.join(state.completed), w.async.join(state.completed_async);
  if (of_cluster) w.generic.join(state.completed_remote), w.async.join(state.completed_remote_async);
}

void Warp::mbarrier_wait(barrier& b, uint32_t parity, Where where) {
  wait_for(begin("mbarrier.wait", where), b, parity, false);
}

}  // namespace mxmoe::interpreter
