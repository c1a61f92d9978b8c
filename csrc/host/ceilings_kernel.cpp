// Probes of the machine's ceilings: see ceilings.h.
#include "host/ceilings.h"
#include "host/simd.h"
#include "host/threads.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

#if defined(MXMOE_ISA_AVX512)
constexpr int kChains = 24;  // independent accumulators: more than latency x throughput, and all in registers
#else
constexpr int kChains = 12;
#endif
constexpr int kTasksPerThread = 8;        // so that a thread that wakes up late does less
constexpr int64_t kChunk = 2 << 20;       // bytes of a task that moves memory
constexpr int64_t kPrefetchAhead = 2048;  // bytes: the hardware's own prefetcher alone reads half as fast on Zen 4

struct FloatChain {
  static constexpr int kOperations = 2 * kLanes;
  MXMOE_INLINE f32 next(f32 sum, f32 x) {
#if defined(MXMOE_ISA_AVX512)
    return (f32)_mm512_fmadd_ps((__m512)sum, (__m512)x, (__m512)x);
#elif defined(MXMOE_ISA_AVX2)
    return (f32)_mm256_fmadd_ps((__m256)sum, (__m256)x, (__m256)x);
#else
    return sum * x + x;
#endif
  }
};

#if defined(MXMOE_ISA_AVX512)
struct PairChain {
  static constexpr int kOperations = 4 * kLanes;
  MXMOE_INLINE f32 next(f32 sum, f32 x) { return (f32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)x); }
};
#endif

template <class Chain>
int64_t run_chains(int64_t steps, int threads) {
  const int64_t tasks = int64_t{threads} * kTasksPerThread, each = (steps + kTasksPerThread - 1) / kTasksPerThread;
  parallel(threads, tasks, [&](int64_t, int) {
    f32 sum[kChains], x = splat(0.5f);
    for (int i = 0; i < kChains; ++i) sum[i] = splat(0.25f * i);  // equal chains would be computed once
    for (int64_t s = 0; s < each; ++s)
#pragma GCC unroll 24
      for (int i = 0; i < kChains; ++i) sum[i] = Chain::next(sum[i], x);
    f32 total = {};
    for (int i = 0; i < kChains; ++i) total += sum[i];
    asm volatile("" ::"m"(total));  // somebody reads it
  });
  return tasks * each * kChains * Chain::kOperations;
}

// body(begin, end) for chunks of [0, bytes).
template <typename F>
MXMOE_INLINE void for_chunks(int threads, int64_t bytes, F&& body) {
  parallel(threads, (bytes + kChunk - 1) / kChunk, [&](int64_t task, int) {
    const int64_t begin = task * kChunk;
    body(begin, begin + kChunk < bytes ? begin + kChunk : bytes);
  });
}

}  // namespace

int64_t multiply_add(bool bf16, int64_t steps, int threads) {
  if (!bf16) return run_chains<FloatChain>(steps, threads);
#if defined(MXMOE_ISA_AVX512)
  return run_chains<PairChain>(steps, threads);
#else
  return 0;
#endif
}

void copy_bytes(char* to, const char* from, int64_t bytes, bool stream, int threads) {
  for_chunks(threads, bytes, [&](int64_t begin, int64_t end) {
    if (!stream) {
      memcpy(to + begin, from + begin, end - begin);
      return;
    }
    stream_copy<kPrefetchAhead>(to + begin, from + begin, end - begin);
#if defined(__x86_64__)
    _mm_sfence();
#endif
  });
}

int64_t read_bytes(const char* from, int64_t bytes, int threads) {
  int64_t result = 0;
  for_chunks(threads, bytes, [&](int64_t begin, int64_t end) {
    constexpr int kVectors = 64 / (4 * kLanes) * 4;  // 256 bytes
    u32 mixed[kVectors] = {};
    int64_t i = begin;
    for (; i + 256 <= end; i += 256) {
      for (int line = 0; line < 256; line += 64) __builtin_prefetch(from + i + line + kPrefetchAhead);
      for (int v = 0; v < kVectors; ++v)
        mixed[v] ^= load<u32>(reinterpret_cast<const uint32_t*>(from + i) + v * kLanes);
    }
    u32 all = {};
    for (int v = 0; v < kVectors; ++v) all ^= mixed[v];
    int64_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += all[lane];
    for (; i < end; ++i) sum += from[i];
    __atomic_fetch_add(&result, sum, __ATOMIC_RELAXED);
  });
  return result;
}

}  // namespace mxmoe::host::MXMOE_ISA
