// The Machine on the CPU: the methods of cuda::Device, one warp at a time, on a Grid that checks them.
//
// A lane<T> is a vector of 32 T, a pred a vector of 32 masks. Every method knows its call site, where a mutant may be
// asked for: "skip" leaves the instruction out; the other kinds are named where they are done.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <source_location>
#include <type_traits>

#include "cuda/tile/tensor_map.h"
#include "cuda/tile/types.h"
#include "interpreter/grid.h"

namespace mxmoe::interpreter {

template <typename T>
struct LaneOf {
  typedef T type __attribute__((vector_size(kLanes * sizeof(T))));
};

struct Warp {
  template <typename T>
  using lane = typename LaneOf<T>::type;
  using pred = lane<int32_t>;
  using tensor_map = cuda::TensorMapArgs;
  using Where = std::source_location;
  using barrier = cuda::barrier;
  using u32 = lane<uint32_t>;

  // Poisoned until they are written; a tcgen05.ld writes them when it is waited for.
  template <typename T, int kCount>
  struct registers {
    lane<T> value[kCount];
    const Warp* pending = nullptr;
    registers() { std::memset(static_cast<void*>(value), 0x7f, sizeof value); }
    registers(const registers&) = delete;
    registers& operator=(const registers&) = delete;
    lane<T>& operator[](int i) {
      if (pending) pending->read_before_wait();
      return value[i];
    }
  };

  Warp(Grid& g, WarpState& state) : grid(g), w(state) {}

  // --- who am I
  void role(const char* name) { w.role = name; }
  int cta_idx() const { return w.cta->idx; }
  int num_ctas() const { return w.cta->running->launch.num_ctas; }
  int cluster_ctarank() const;
  int warp_idx() const { return w.idx; }
  lane<int> lane_idx() const {
    lane<int> r;
    for (int i = 0; i < kLanes; ++i) r[i] = i;
    return r;
  }
  pred elect_one() const { return lane_idx() == 0; }

  // --- lanes
  template <typename T>
  lane<T> splat(T x) const {
    return lane<T>{} + x;
  }
  template <typename To, typename From>
  auto cast(From x) const {
    return __builtin_convertvector(x, lane<To>);
  }
  template <typename T>
  T select(pred p, T a, T b) const {
    return p ? a : b;
  }
  template <typename T>
  T shfl_xor(T x, int mask) const {
    T r;
    for (int i = 0; i < kLanes; ++i) r[i] = x[i ^ mask];
    return r;
  }
  template <typename T>
  T shfl_up(T x, int delta) const {
    T r = x;
    for (int i = delta; i < kLanes; ++i) r[i] = x[i - delta];
    return r;
  }
  bool any(pred p) const {
    for (int i = 0; i < kLanes; ++i)
      if (p[i]) return true;
    return false;
  }
  u32 match_any(u32 x) const;
  u32 popc(u32 x) const;
  template <typename T>
  auto read_lane(T x, int i) const {
    return x[i];
  }
  uint32_t redux_max(u32 x) const;
  uint32_t redux_min(u32 x) const;

  // --- arithmetic
  lane<float> divide(lane<float> a, lane<float> b) const { return a / b; }
  lane<float> fma(lane<float> a, lane<float> b, lane<float> c) const;
  lane<float> half_to_float(u32 h) const;
  u32 cvt_f16x2_e4m3x2(u32 codes) const;
  u32 cvt_e4m3x2(lane<float> low, lane<float> high) const;
  u32 cvt_e5m2x2(lane<float> low, lane<float> high) const;
  u32 cvt_bf16x2(lane<float> low, lane<float> high) const;
  u32 cvt_f16x2(lane<float> low, lane<float> high) const;
  u32 mul_hi(u32 a, uint32_t b) const { return cast<uint32_t>(cast<uint64_t>(a) * b >> 32); }
  u32 mul_bf16x2(u32 a, u32 b) const;

  // --- global memory
  template <typename T>  // through a cache that knows what was written before the kernel began
  T ld_global_uniform(const T* p, Where where = Where::current()) {
    T x{};
    load_global(&x, p, lane<int>{}, lane_idx() == 0, sizeof(T), sizeof(T), "ld.global.uniform", where, true);
    return x;
  }
  template <typename T>
  lane<T> ld_global(const void* base, lane<int> offset, pred p, Where where = Where::current()) {
    lane<T> r{};
    load_global(&r, base, offset, p, sizeof(T), sizeof(T), "ld.global", where);
    return r;
  }
  template <int kCount>
  void load_global_words(registers<uint32_t, kCount>& d, const void* base, lane<int> offset, pred p, const char* name,
                         Where where) {
    uint32_t words[kLanes][kCount] = {};
    load_global(words, base, offset, p, 4 * kCount, 4 * kCount, name, where);
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < kCount; ++j) d.value[j][i] = words[i][j];
  }
  void ld_global_v2(registers<uint32_t, 2>& d, const void* base, lane<int> offset, pred p,
                    Where where = Where::current()) {
    load_global_words(d, base, offset, p, "ld.global.v2", where);
  }
  void ld_global_v4(registers<uint32_t, 4>& d, const void* base, lane<int> offset, pred p,
                    Where where = Where::current()) {
    load_global_words(d, base, offset, p, "ld.global.v4", where);
  }
  template <typename T, typename V>
  void st_global(void* base, lane<int> offset, V x, pred p, Where where = Where::current()) {
    static_assert(std::is_same_v<V, lane<T>>);
    store_global(base, offset, &x, p, sizeof(T), "st.global", where);
  }
  void st_global_v2(void* base, lane<int> offset, u32 x, u32 y, pred p, Where where = Where::current()) {
    const auto words = by_lane<2>({x, y});
    store_global(base, offset, &words, p, 8, "st.global.v2", where);
  }
  void st_global_v4(void* base, lane<int> offset, u32 x, u32 y, u32 z, u32 v, pred p, Where where = Where::current()) {
    const auto words = by_lane<4>({x, y, z, v});
    store_global(base, offset, &words, p, 16, "st.global.v4", where);
  }

  // --- flags in global memory
  void red_release_sys_add(uint32_t* flag, uint32_t value, pred p, Where where = Where::current());
  void wait_acquire_sys(const uint32_t* flag, uint32_t at_least, Where where = Where::current());

  // --- shared memory
  template <typename T>
  T& shared() const {
    return *reinterpret_cast<T*>(w.cta->shared);
  }
  uint32_t shared_address(const void* p) const {
    return static_cast<uint32_t>(static_cast<const std::byte*>(p) - w.cta->shared);
  }
  uint32_t ld_shared_uniform(uint32_t address, Where where = Where::current());
  u32 ld_shared(u32 address, Where where = Where::current()) {
    u32 r;
    load_shared(&r, address, 4, "ld.shared", where);
    return r;
  }
  template <int kCount>
  void load_shared_words(registers<uint32_t, kCount>& d, u32 address, const char* name, Where where) {
    uint32_t words[kLanes][kCount];
    load_shared(words, address, 4 * kCount, name, where);
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < kCount; ++j) d.value[j][i] = words[i][j];
  }
  void ld_shared_v2(registers<uint32_t, 2>& d, u32 address, Where where = Where::current()) {
    load_shared_words(d, address, "ld.shared.v2", where);
  }
  void ld_shared_v4(registers<uint32_t, 4>& d, u32 address, Where where = Where::current()) {
    load_shared_words(d, address, "ld.shared.v4", where);
  }
  void st_shared(u32 address, u32 x, pred p, Where where = Where::current()) {
    store_shared(address, &x, p, 4, 4, "st.shared", where);
  }
  void st_shared_v2(u32 address, u32 x, u32 y, pred p, Where where = Where::current()) {
    const auto words = by_lane<2>({x, y});
    store_shared(address, &words, p, 8, 8, "st.shared.v2", where);
  }
  void st_shared_v4(u32 address, u32 x, u32 y, u32 z, u32 v, pred p, Where where = Where::current()) {
    const auto words = by_lane<4>({x, y, z, v});
    store_shared(address, &words, p, 16, 16, "st.shared.v4", where);
  }
  void st_shared_u8(u32 address, u32 x, pred p, Where where = Where::current()) {
    store_shared(address, &x, p, 1, 4, "st.shared.u8", where);
  }

  // --- barriers
  void syncthreads(Where where = Where::current());
  void syncwarp(Where = Where::current()) {}
  void mbarrier_init(barrier& b, int count, pred p, Where where = Where::current());
  void fence_mbarrier_init(Where where = Where::current());
  void mbarrier_arrive(barrier& b, pred p, Where where = Where::current());
  void mbarrier_arrive_expect_tx(barrier& b, uint32_t num_bytes, pred p, Where where = Where::current());
  void mbarrier_wait(barrier& b, uint32_t parity, Where where = Where::current());

  // --- clusters
  uint32_t mapa(uint32_t address, int rank, Where where = Where::current());
  void barrier_cluster_arrive(Where where = Where::current());
  void barrier_cluster_wait(Where where = Where::current());
  void mbarrier_arrive_cluster(uint32_t address, pred p, Where where = Where::current());
  void mbarrier_wait_cluster(barrier& b, uint32_t parity, Where where = Where::current());

  // --- TMA and bulk copies
  void tma_load(void* shared, const tensor_map& map, int column, int row, barrier& b, pred p,
                Where where = Where::current()) {
    load_box("tma_load", shared, map, column, row, shared_address(&b), p, where);
  }
  void tma_load_pair(void* shared, const tensor_map& map, int column, int row, uint32_t barrier_address, pred p,
                     Where where = Where::current()) {
    load_box("tma_load", shared, map, column, row, barrier_address, p, where);
  }
  void bulk_load(void* shared, const void* global, uint32_t num_bytes, barrier& b, pred p,
                 Where where = Where::current());
  void tma_store(const tensor_map& map, int column, int row, const void* shared, pred p,
                 Where where = Where::current()) {
    store_box("tma_store", map, column, row, shared, false, p, where);
  }
  void tma_reduce_add(const tensor_map& map, int column, int row, const void* shared, pred p,
                      Where where = Where::current()) {
    store_box("tma_reduce_add", map, column, row, shared, true, p, where);
  }
  void bulk_store(void* global, const void* shared, uint32_t num_bytes, pred p, Where where = Where::current());
  void bulk_commit_group(Where where = Where::current());
  template <int kPending>
  void bulk_wait_group_read(Where where = Where::current()) {
    wait_for_groups("bulk_wait_group.read", kPending, true, where);
  }
  template <int kPending>
  void bulk_wait_group(Where where = Where::current()) {
    wait_for_groups("bulk_wait_group", kPending, false, where);
  }
  void fence_proxy_async(Where where = Where::current());
  void fence_proxy_async_global(Where where = Where::current());

  // --- tensor memory and the tensor core
  template <int kCtas = 1>
  void tcgen05_alloc(uint32_t shared, uint32_t columns, Where where = Where::current()) {
    alloc(kCtas, shared, columns, where);
  }
  template <int kCtas = 1>
  void tcgen05_dealloc(uint32_t tmem, uint32_t columns, Where where = Where::current()) {
    dealloc(kCtas, tmem, columns, where);
  }
  template <int kCtas = 1>
  void tcgen05_cp_32x128b_warpx4(uint32_t tmem, uint64_t descriptor, pred p, Where where = Where::current()) {
    copy_scales(kCtas, tmem, descriptor, p, where);
  }
  template <cuda::MmaKind kKind, int kCtas = 1>
  void tcgen05_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate, uint32_t scale_a,
                   uint32_t scale_b, pred p, Where where = Where::current()) {
    mma(kKind, kCtas, d, a, b, instruction, accumulate, scale_a, scale_b, p, where);
  }
  void tcgen05_commit(barrier& b, pred p, Where where = Where::current()) { commit("tcgen05.commit", 1, b, p, where); }
  void tcgen05_commit_pair(barrier& b, pred p, Where where = Where::current()) {
    commit("tcgen05.commit.multicast", 2, b, p, where);
  }
  void tcgen05_ld(registers<uint32_t, 16>& d, uint32_t tmem, Where where = Where::current());
  void tcgen05_wait_ld(registers<uint32_t, 16>& d, Where where = Where::current());
  void tcgen05_fence_before_thread_sync(Where where = Where::current());
  void tcgen05_fence_after_thread_sync(Where where = Where::current());

  // --- wgmma
  void wgmma_fence(Where where = Where::current());
  void wgmma_commit_group(Where where = Where::current());
  template <int kPending>
  void wgmma_wait_group(registers<float, 64>& d, Where where = Where::current()) {
    wait_for_wgmma(d, kPending, where);
  }
  template <bool kBF16, bool kAMNMajor, bool kBMNMajor>
  void wgmma_m64n128k16(registers<float, 64>& d, uint64_t a, uint64_t b, bool accumulate,
                        Where where = Where::current()) {
    wgmma(d, a, b, kBF16, kAMNMajor, kBMNMajor, accumulate, where);
  }

  [[noreturn]] void read_before_wait() const;
  void end();

  Grid& grid;
  WarpState& w;

 private:
  template <int kCount>
  static std::array<std::array<uint32_t, kCount>, kLanes> by_lane(const u32 (&words)[kCount]) {
    std::array<std::array<uint32_t, kCount>, kLanes> r;
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < kCount; ++j) r[static_cast<size_t>(i)][static_cast<size_t>(j)] = words[j][i];
    return r;
  }

  using Op = Grid::Op;
  Op begin(const char* name, Where where) { return grid.begin(w, name, where); }
  pred active(const Op& op, pred p) const;  // mutants "all lanes", "no lane"
  pred one_lane(const Op& op, pred p) const;
  Barrier& barrier_at(const Op& op, const barrier& b);
  void block(const Op& op, std::function<bool()> ready, std::function<std::string()> text);
  void wait_for(const Op& op, barrier& b, uint32_t parity, bool of_cluster);

  void load_global(void* to, const void* base, lane<int> offset, pred p, size_t num_bytes, size_t pitch,
                   const char* name, Where where, bool cached = false);
  void store_global(void* base, lane<int> offset, const void* from, pred p, size_t num_bytes, const char* name,
                    Where where);
  void load_shared(void* to, u32 address, size_t num_bytes, const char* name, Where where);
  void store_shared(u32 address, const void* from, pred p, size_t num_bytes, size_t pitch, const char* name,
                    Where where);
  using Bytes = std::vector<std::byte>;
  void check_box(const Op& op, const tensor_map& map, uint32_t shared_address);
  void load_box(const char* name, void* shared, const tensor_map& map, int column, int row, uint32_t barrier_address,
                pred p, Where where);
  void copy_in(const Op& op, uint32_t barrier_address, uint32_t to, std::function<Bytes(uint32_t record)> read);
  void store_box(const char* name, const tensor_map& map, int column, int row, const void* shared, bool add, pred p,
                 Where where);
  void copy_out(const Op& op, std::function<Bytes(uint32_t record)> read,
                std::function<void(uint32_t component, uint32_t step, const Bytes&)> write);
  void wait_for_groups(const char* name, size_t pending, bool read, Where where);
  void alloc(int ctas, uint32_t shared, uint32_t columns, Where where);
  void dealloc(int ctas, uint32_t tmem, uint32_t columns, Where where);
  void copy_scales(int ctas, uint32_t tmem, uint64_t descriptor, pred p, Where where);
  void commit(const char* name, int ctas, barrier& b, pred p, Where where);
  std::vector<Cta*> tensor_ctas(const Op& op, int ctas);
  void mma(cuda::MmaKind kind, int ctas, uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate,
           uint32_t scale_a, uint32_t scale_b, pred p, Where where);

  void wait_for_wgmma(registers<float, 64>& d, int pending, Where where);
  void wgmma(registers<float, 64>& d, uint64_t a, uint64_t b, bool bf16, bool a_mn, bool b_mn, bool accumulate,
             Where where);

  // Bulk stores that are waited for together: first until they have read shared memory, then until they have written.
  struct BulkGroup {
    bool committed = false, read = false;  // read: waited for
    int reading = 0, writing = 0;          // stores that have not yet
    Clock reads, writes;
  };
  std::deque<BulkGroup> bulk_groups_;

  struct WgmmaOp {
    std::function<void()> run;
    uint32_t step;
    int group;  // -1: not committed
  };
  std::vector<WgmmaOp> wgmmas_;  // issued and not waited for
  int wgmma_groups_ = 0;         // committed
  bool wgmma_fenced_ = false;
  uint32_t loading_ = 0;  // address of the tcgen05.ld that is not waited for
};

}  // namespace mxmoe::interpreter
