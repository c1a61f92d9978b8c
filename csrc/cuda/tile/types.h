// The nouns of a kernel: shared-memory tiles, barriers, positions in a ring. Names are ThunderKittens' where it has
// one.
#pragma once
#include <cstdint>
#include <utility>

#include "descriptors.h"
#include "swizzle.h"

#if defined(__CUDACC__)
#define MXMOE_KERNEL __device__ __forceinline__
#else
#define MXMOE_KERNEL inline
#endif

namespace mxmoe::cuda {

// f(0), ..., f(kCount - 1) written out: registers cannot be indexed by a variable.
template <int kCount, class F>
MXMOE_KERNEL void unrolled(F f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (f(kIndex), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Shared-memory tile: kRows lines of kRowBytes, swizzled as the TMA box that fills it.
template <int kRows, int kRowBytes, Swizzle kSwizzle = Swizzle::kNone>
struct alignas(1024) st {
  static constexpr int rows = kRows, row_bytes = kRowBytes, num_bytes = kRows * kRowBytes;
  static constexpr Swizzle swizzle = kSwizzle;
  static_assert(kSwizzle == Swizzle::kNone || kRowBytes == swizzle_bytes(kSwizzle),
                "a swizzled line is as wide as its swizzle");
  uint8_t bytes[num_bytes];

  // As an operand of the tensor core whose contraction runs along the lines, at this shared-memory address.
  MXMOE_FACT SharedOperand k_major(uint32_t address) { return {address, 16, 8 * kRowBytes, kSwizzle}; }
  // As one whose contraction runs across the lines; tiles one after the other lie side by side along M or N.
  MXMOE_FACT SharedOperand mn_major(uint32_t address) { return {address, num_bytes, 8 * kRowBytes, kSwizzle}; }
};

// 512 bytes of block scales in the blocked layout: 128 lines x 4 blocks.
struct alignas(128) scale_tile {
  static constexpr int num_bytes = 512;
  uint8_t bytes[num_bytes];
  MXMOE_FACT SharedOperand as_operand(uint32_t address) {  // rows of 16 bytes, eight of them 128 apart
    return {address, 16, 128, Swizzle::kNone};
  }
};

// mbarrier object.
struct alignas(8) barrier {
  uint64_t bits;
};

// A place in a ring of kSlots: the slot, and the parity of the lap. The consumer waits for `full` with `parity`, the
// producer for `empty` with `parity ^ 1`, which passes on the first lap.
template <int kSlots>
struct ring {
  int slot = 0;
  uint32_t parity = 0;
  MXMOE_KERNEL void advance() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

template <class C>
constexpr int cluster_of() {
  if constexpr (requires { C::kCluster; })
    return C::kCluster;
  else
    return 1;
}

}  // namespace mxmoe::cuda

// What a launcher takes of a kernel, at the end of its namespace: launchable<config>, with the kernel's name in
// reports, its number of warps, of CTAs in a cluster (config's kCluster, or 1), its shared memory, globals and text.
#define MXMOE_LAUNCHABLE(NAME, SHARED)                        \
  template <class C>                                          \
  struct launchable {                                         \
    static constexpr const char* name = NAME;                 \
    static constexpr int warps = C::kWarps;                   \
    static constexpr int cluster = cluster_of<C>();           \
    using shared_type = SHARED;                               \
    template <class M>                                        \
    using globals_type = globals<M>;                          \
    template <class M>                                        \
    MXMOE_KERNEL static void run(M& m, const globals<M>& g) { \
      kernel<C>(m, g);                                        \
    }                                                         \
  };
