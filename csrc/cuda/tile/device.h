// The Machine of a GPU: one method = one PTX instruction. All inline assembly of the project is in this file.
//
// A lane<T> is the thread's own T, a pred its own bool. Methods that one thread issues take a pred that is true in that
// thread (see elect_one). sm_90a has wgmma, sm_100a and sm_103a have tcgen05; what an architecture lacks does not
// compile.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "types.h"

namespace mxmoe::cuda {

// The driver's 128 opaque bytes.
struct alignas(64) DeviceTensorMap {
  uint64_t opaque[16];
};

struct Device {
  template <typename T>
  using lane = T;
  using pred = bool;
  using tensor_map = DeviceTensorMap;
  template <typename T, int kCount>
  struct registers {
    T value[kCount];
    __device__ __forceinline__ T& operator[](int i) { return value[i]; }
    __device__ __forceinline__ const T& operator[](int i) const { return value[i]; }
  };

#define MXMOE_OP __device__ __forceinline__

  // --- who am I
  MXMOE_OP void role(const char*) const {}
  MXMOE_OP int cta_idx() const { return blockIdx.x; }
  MXMOE_OP int num_ctas() const { return gridDim.x; }
  MXMOE_OP int cluster_ctarank() const {
    int r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
  }
  MXMOE_OP int warp_idx() const {
    return __shfl_sync(~0u, threadIdx.x / 32, 0);
  }  // so that the compiler knows it is uniform
  MXMOE_OP int lane_idx() const { return threadIdx.x % 32; }
  MXMOE_OP bool elect_one() const {
    uint32_t elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(elected));
    return elected != 0;
  }

  // --- lanes
  template <typename T>
  MXMOE_OP T splat(T x) const {
    return x;
  }
  template <typename To, typename From>
  MXMOE_OP To cast(From x) const {
    return static_cast<To>(x);
  }
  template <typename T>
  MXMOE_OP T select(bool p, T a, T b) const {
    return p ? a : b;
  }
  template <typename T>
  MXMOE_OP T shfl_xor(T x, int mask) const {
    return __shfl_xor_sync(~0u, x, mask);
  }
  template <typename T>
  MXMOE_OP T shfl_up(T x, int delta) const {  // the first lanes keep theirs
    const T below = __shfl_up_sync(~0u, x, delta);
    return lane_idx() < delta ? x : below;
  }
  MXMOE_OP bool any(bool p) const { return __any_sync(~0u, p); }
  MXMOE_OP uint32_t match_any(uint32_t x) const { return __match_any_sync(~0u, x); }  // bits of the lanes with this x
  MXMOE_OP uint32_t popc(uint32_t x) const { return __popc(x); }
  // The same for all lanes:
  template <typename T>
  MXMOE_OP T read_lane(T x, int i) const {
    return __shfl_sync(~0u, x, i);
  }
  MXMOE_OP uint32_t redux_max(uint32_t x) const { return __reduce_max_sync(~0u, x); }
  MXMOE_OP uint32_t redux_min(uint32_t x) const { return __reduce_min_sync(~0u, x); }

  // --- arithmetic with an instruction of its own; every other operator is IEEE FP32, compiled with -fmad=false
  MXMOE_OP float divide(float a, float b) const { return __fdiv_rn(a, b); }
  MXMOE_OP float half_to_float(uint32_t h) const { return __half2float(__ushort_as_half(static_cast<uint16_t>(h))); }
  MXMOE_OP float fma(float a, float b, float c) const { return __fmaf_rn(a, b, c); }
  MXMOE_OP uint32_t cvt_f16x2_e4m3x2(uint32_t codes) const {  // of bits 0-15, exactly
    uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(static_cast<uint16_t>(codes)));
    return r;
  }
  MXMOE_OP uint32_t cvt_e4m3x2(float low, float high) const {  // nearest even, saturating; bits 0-15
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
  }
  MXMOE_OP uint32_t cvt_e5m2x2(float low, float high) const {
    uint16_t r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
  }
  MXMOE_OP uint32_t cvt_bf16x2(float low, float high) const {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  MXMOE_OP uint32_t mul_hi(uint32_t a, uint32_t b) const { return __umulhi(a, b); }
  MXMOE_OP uint32_t mul_bf16x2(uint32_t a, uint32_t b) const {  // nearest even, subnormals kept
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  MXMOE_OP uint32_t cvt_f16x2(float low, float high) const {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }

  // --- global memory. A base that all lanes share and a byte offset of each lane; inactive lanes load 0.
  template <typename T>
  MXMOE_OP T ld_global_uniform(const T* p) const {
    return __ldg(p);
  }
  template <typename T>
  MXMOE_OP T ld_global(const void* base, int offset, bool p) const {
    return p ? *reinterpret_cast<const T*>(static_cast<const char*>(base) + offset) : T{};
  }
  MXMOE_OP void ld_global_v2(registers<uint32_t, 2>& d, const void* base, int offset, bool p) const {
    uint2 v = p ? *reinterpret_cast<const uint2*>(static_cast<const char*>(base) + offset) : uint2{};
    d[0] = v.x, d[1] = v.y;
  }
  MXMOE_OP void ld_global_v4(registers<uint32_t, 4>& d, const void* base, int offset, bool p) const {
    uint4 v = p ? *reinterpret_cast<const uint4*>(static_cast<const char*>(base) + offset) : uint4{};
    d[0] = v.x, d[1] = v.y, d[2] = v.z, d[3] = v.w;
  }
  template <typename T>
  MXMOE_OP void st_global(void* base, int offset, T x, bool p) const {
    if (p) *reinterpret_cast<T*>(static_cast<char*>(base) + offset) = x;
  }
  MXMOE_OP void st_global_v2(void* base, int offset, uint32_t x, uint32_t y, bool p) const {
    if (p) *reinterpret_cast<uint2*>(static_cast<char*>(base) + offset) = make_uint2(x, y);
  }
  MXMOE_OP void st_global_v4(void* base, int offset, uint32_t x, uint32_t y, uint32_t z, uint32_t w, bool p) const {
    if (p) *reinterpret_cast<uint4*>(static_cast<char*>(base) + offset) = make_uint4(x, y, z, w);
  }

  // --- flags in global memory, of this device or of a peer: what the warp did before (past a syncwarp) is seen by who
  // waits for the flag. ld_global_uniform may not read what is written while its kernel runs.
  MXMOE_OP void red_release_sys_add(uint32_t* flag, uint32_t value, bool p) const {
    if (p) asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
  }
  // ld.acquire until the flag is at least that: a loop, as mbarrier_wait.
  MXMOE_OP void wait_acquire_sys(const uint32_t* flag, uint32_t at_least) const {
    uint32_t value;
    do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    while (value < at_least);
  }

  // --- shared memory: 32-bit addresses
  template <typename T>
  MXMOE_OP T& shared() const {
    extern __shared__ __align__(1024) uint8_t memory[];
    return *reinterpret_cast<T*>(memory);
  }
  MXMOE_OP uint32_t shared_address(const void* p) const { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
  MXMOE_OP uint32_t ld_shared_uniform(uint32_t address) const {
    uint32_t r;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
    return r;
  }
  MXMOE_OP uint32_t ld_shared(uint32_t address) const { return ld_shared_uniform(address); }
  MXMOE_OP void ld_shared_v2(registers<uint32_t, 2>& d, uint32_t address) const {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(address) : "memory");
  }
  MXMOE_OP void ld_shared_v4(registers<uint32_t, 4>& d, uint32_t address) const {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
  }
  MXMOE_OP void st_shared(uint32_t address, uint32_t x, bool p) const {
    if (p) asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
  }
  MXMOE_OP void st_shared_v2(uint32_t address, uint32_t x, uint32_t y, bool p) const {
    if (p) asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
  }
  MXMOE_OP void st_shared_v4(uint32_t address, uint32_t x, uint32_t y, uint32_t z, uint32_t w, bool p) const {
    if (p)
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w)
                   : "memory");
  }
  MXMOE_OP void st_shared_u8(uint32_t address, uint32_t x, bool p) const {
    if (p) asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(x) : "memory");
  }

  // --- barriers
  MXMOE_OP void syncthreads() const { __syncthreads(); }
  MXMOE_OP void syncwarp() const { __syncwarp(); }
  MXMOE_OP void mbarrier_init(barrier& b, int count, bool p) const {
    if (p) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&b)), "r"(count) : "memory");
  }
  MXMOE_OP void fence_mbarrier_init() const { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
  MXMOE_OP void mbarrier_arrive(barrier& b, bool p) const {
    if (p) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&b)) : "memory");
  }
  MXMOE_OP void mbarrier_arrive_expect_tx(barrier& b, uint32_t num_bytes, bool p) const {
    if (p)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&b)), "r"(num_bytes)
                   : "memory");
  }
  // try_wait until the phase of this parity has ended: the one method that is a loop.
  MXMOE_OP void mbarrier_wait(barrier& b, uint32_t parity) const {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(&b)),
        "r"(parity)
        : "memory");
  }

  // --- clusters. Before the first access to another CTA's shared memory its warps have begun, past the last one none
  // has ended: barrier_cluster at both ends. The address, in the cluster, of what is at `address` in the shared memory
  // of CTA `rank` of it.
  MXMOE_OP uint32_t mapa(uint32_t address, int rank) const {
    uint32_t r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
  }
  MXMOE_OP void barrier_cluster_arrive() const { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
  MXMOE_OP void barrier_cluster_wait() const { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
  MXMOE_OP void mbarrier_arrive_cluster(uint32_t address, bool p) const {
    if (p) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
  }
  // For what warps of other CTAs did before they arrived, as well.
  MXMOE_OP void mbarrier_wait_cluster(barrier& b, uint32_t parity) const {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(&b)),
        "r"(parity)
        : "memory");
  }

  // --- TMA and bulk copies (async proxy)
  MXMOE_OP void tma_load(void* shared, const tensor_map& map, int column, int row, barrier& b, bool p) const {
    if (p)
      asm volatile(
          "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
              shared_address(shared)),
          "l"(&map), "r"(column), "r"(row), "r"(shared_address(&b))
          : "memory");
  }
  // Completes bytes of a barrier of either CTA of a pair (an address of the cluster). sm_100a.
  MXMOE_OP void tma_load_pair(void* shared, const tensor_map& map, int column, int row, uint32_t barrier_address,
                              bool p) const {
    if (p)
      asm volatile(
          "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
          "%3}], [%4];" ::"r"(shared_address(shared)),
          "l"(&map), "r"(column), "r"(row), "r"(barrier_address)
          : "memory");
  }
  MXMOE_OP void bulk_load(void* shared, const void* global, uint32_t num_bytes, barrier& b, bool p) const {
    if (p)
      asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       shared_address(shared)),
                   "l"(global), "r"(num_bytes), "r"(shared_address(&b))
                   : "memory");
  }
  // Stores go by groups: a thread commits what it has issued, and waits until all its groups but the last kPending have
  // read shared memory, or have written global memory as well.
  MXMOE_OP void tma_store(const tensor_map& map, int column, int row, const void* shared, bool p) const {
    if (p)
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                   "r"(column), "r"(row), "r"(shared_address(shared))
                   : "memory");
  }
  // Of FP32, BF16 or FP16 by the map. In no order: for elements that one store adds to.
  MXMOE_OP void tma_reduce_add(const tensor_map& map, int column, int row, const void* shared, bool p) const {
    if (p)
      asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                   "r"(column), "r"(row), "r"(shared_address(shared))
                   : "memory");
  }
  MXMOE_OP void bulk_store(void* global, const void* shared, uint32_t num_bytes, bool p) const {
    if (p)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                   "r"(shared_address(shared)), "r"(num_bytes)
                   : "memory");
  }
  MXMOE_OP void bulk_commit_group() const { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
  template <int kPending>
  MXMOE_OP void bulk_wait_group_read() const {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
  }
  template <int kPending>
  MXMOE_OP void bulk_wait_group() const {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
  }
  // Between generic accesses, those that the thread has waited for among them, and copies: to shared memory, to global.
  MXMOE_OP void fence_proxy_async() const { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
  MXMOE_OP void fence_proxy_async_global() const { asm volatile("fence.proxy.async.global;" ::: "memory"); }

  // --- tensor memory and the tensor core of sm_100a
  // kCtas: 2 where a pair of CTAs works as one. A warp of each allocates and frees; a thread of the first one copies
  // (shared to tensor memory of each) and multiplies: M / 2 rows of A and of D and N / 2 lines of B are in each.
#define MXMOE_TCGEN05(kCtas, before, after, ...)           \
  if constexpr (kCtas == 2)                                \
    asm volatile(before "cta_group::2" after __VA_ARGS__); \
  else                                                     \
    asm volatile(before "cta_group::1" after __VA_ARGS__)
  template <int kCtas = 1>
  MXMOE_OP void tcgen05_alloc(uint32_t shared, uint32_t columns) const {
    MXMOE_TCGEN05(kCtas, "tcgen05.alloc.", ".sync.aligned.shared::cta.b32 [%0], %1;", ::"r"(shared),
                  "r"(columns) : "memory");
  }
  template <int kCtas = 1>
  MXMOE_OP void tcgen05_dealloc(uint32_t tmem, uint32_t columns) const {
    MXMOE_TCGEN05(kCtas, "tcgen05.dealloc.", ".sync.aligned.b32 %0, %1;", ::"r"(tmem), "r"(columns));
  }
  template <int kCtas = 1>
  MXMOE_OP void tcgen05_cp_32x128b_warpx4(uint32_t tmem, uint64_t descriptor, bool p) const {
    if (p) MXMOE_TCGEN05(kCtas, "tcgen05.cp.", ".32x128b.warpx4 [%0], %1;", ::"r"(tmem), "l"(descriptor) : "memory");
  }
  // D (+)= A B^T. Block-scaled kinds read scale words at scale_a, scale_b.
  template <MmaKind kKind, int kCtas = 1>
  MXMOE_OP void tcgen05_mma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate, uint32_t scale_a,
                            uint32_t scale_b, bool p) const {
    if (!p) return;
#define MXMOE_MMA(kind, scales)                                                                       \
  MXMOE_TCGEN05(kCtas, "{ .reg .pred p; setp.ne.b32 p, %4, 0;\ntcgen05.mma.",                         \
                kind " [%0], %1, %2, %3, " scales "p; }", ::"r"(d), "l"(a), "l"(b), "r"(instruction), \
                "r"(uint32_t{accumulate}), "r"(scale_a), "r"(scale_b) : "memory")
    if constexpr (kKind == MmaKind::kF16)
      MXMOE_MMA(".kind::f16", "");
    else if constexpr (kKind == MmaKind::kMxf8f6f4)
      MXMOE_MMA(".kind::mxf8f6f4.block_scale.block32", "[%5], [%6], ");
    else
      MXMOE_MMA(".kind::mxf4nvf4.block_scale.block16", "[%5], [%6], ");
#undef MXMOE_MMA
  }
#undef MXMOE_TCGEN05
  MXMOE_OP void tcgen05_commit(barrier& b, bool p) const {
    if (p)
      asm volatile(
          "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(shared_address(&b))
          : "memory");
  }
  // Of a pair, at the barriers in the same place in both CTAs.
  MXMOE_OP void tcgen05_commit_pair(barrier& b, bool p) const {
    if (p)
      asm volatile(
          "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
              shared_address(&b)),
          "h"(uint16_t{3})
          : "memory");
  }
  // 16 columns of this warp's 32 lanes; readable after tcgen05_wait_ld.
  MXMOE_OP void tcgen05_ld(registers<uint32_t, 16>& d, uint32_t tmem) const {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
        "%15}, [%16];"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]), "=r"(d[4]), "=r"(d[5]), "=r"(d[6]), "=r"(d[7]), "=r"(d[8]),
          "=r"(d[9]), "=r"(d[10]), "=r"(d[11]), "=r"(d[12]), "=r"(d[13]), "=r"(d[14]), "=r"(d[15])
        : "r"(tmem)
        : "memory");
  }
  // Takes the registers so that the compiler moves no use of them up.
  MXMOE_OP void tcgen05_wait_ld(registers<uint32_t, 16>& d) const {
    asm volatile("tcgen05.wait::ld.sync.aligned;"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]),
                   "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]),
                   "+r"(d[15])::"memory");
  }
  MXMOE_OP void tcgen05_fence_before_thread_sync() const {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  }
  MXMOE_OP void tcgen05_fence_after_thread_sync() const {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  }

  // --- the tensor core of sm_90a. A warpgroup, four warps, issues together; D is in registers (see wgmma_row).
  MXMOE_OP void wgmma_fence() const { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  MXMOE_OP void wgmma_commit_group() const { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
  // Until all but the last kPending groups are over; without any, takes the registers so that the compiler moves no use
  // of them up.
  template <int kPending>
  MXMOE_OP void wgmma_wait_group(registers<float, 64>& d) const {
    if constexpr (kPending > 0)
      asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    else
      asm volatile(
          "wgmma.wait_group.sync.aligned 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
            "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
            "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
            "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
            "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
            "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
            "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
            "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])::"memory");
  }
  // 64 x 128 (+)= 64 x 16 times 16 x 128 of BF16 or FP16, each operand K-major or MN-major.
  template <bool kBF16, bool kAMNMajor, bool kBMNMajor>
  MXMOE_OP void wgmma_m64n128k16(registers<float, 64>& d, uint64_t a, uint64_t b, bool accumulate) const {
#define MXMOE_WGMMA(type)                                                                                              \
  asm volatile(                                                                                                        \
      "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"                                                                       \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                                     \
      " {"                                                                                                             \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                                          \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"                                \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"                                \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, %67, %68; " \
      "}"                                                                                                              \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),    \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),         \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),        \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),        \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),        \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),        \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),        \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])                      \
      : "l"(a), "l"(b), "r"(uint32_t{accumulate}), "n"(kAMNMajor), "n"(kBMNMajor)                                      \
      : "memory")
    if constexpr (kBF16)
      MXMOE_WGMMA("bf16");
    else
      MXMOE_WGMMA("f16");
#undef MXMOE_WGMMA
  }

#undef MXMOE_OP
};

}  // namespace mxmoe::cuda
