// diff and apply of two versions of a tensor. Chunks stand on their own, so that both run on every thread.
#include <atomic>
#include <type_traits>

#include "host/delta.h"
#include "host/simd.h"
#include "host/threads.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

template <typename U>
constexpr int kBlock = 64 / sizeof(U);  // elements compared at once

// Bit i: a[i] != b[i].
template <typename U>
MXMOE_INLINE uint64_t differing(const U* a, const U* b) {
#if defined(MXMOE_ISA_AVX512)
  const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  if constexpr (sizeof(U) == 1) return _mm512_cmpneq_epi8_mask(x, y);
  if constexpr (sizeof(U) == 2) return _mm512_cmpneq_epi16_mask(x, y);
  return _mm512_cmpneq_epi32_mask(x, y);
#else
  if (memcmp(a, b, 64) == 0) return 0;
  uint64_t mask = 0;
  for (int i = 0; i < kBlock<U>; ++i) mask |= uint64_t{a[i] != b[i]} << i;
  return mask;
#endif
}

template <typename U, typename F>
MXMOE_INLINE void for_each_change(const U* a, const U* b, int64_t n, F&& change) {
  int64_t i = 0;
  for (; i + kBlock<U> <= n; i += kBlock<U>)
    for (uint64_t mask = differing(a + i, b + i); mask; mask &= mask - 1) change(i + __builtin_ctzll(mask));
  for (; i < n; ++i)
    if (a[i] != b[i]) change(i);
}

// Bits of a float (or of two) <-> integers in the order of the values; -0 lies right below 0. Its own inverse is
// `bits_of`.
template <typename U, DeltaOrder O>
MXMOE_INLINE U rank_of(U x) {
  if constexpr (O == DeltaOrder::kSignMagnitude) {
    constexpr U sign = U(U{1} << (8 * sizeof(U) - 1));
    return x & sign ? U(~x) : U(x | sign);
  }
  if constexpr (O == DeltaOrder::kNibbles) {
    const U negative = U((x & 0x88) >> 3);  // 1 in each nibble below zero
    return U(x ^ (0x88 | negative * 7));
  }
  return x;
}
template <typename U, DeltaOrder O>
MXMOE_INLINE U bits_of(U rank) {
  if constexpr (O == DeltaOrder::kSignMagnitude) {
    constexpr U sign = U(U{1} << (8 * sizeof(U) - 1));
    return rank & sign ? U(rank ^ sign) : U(~rank);
  }
  if constexpr (O == DeltaOrder::kNibbles) {
    const U negative = U((~rank & 0x88) >> 3);
    return U(rank ^ (0x88 | negative * 7));
  }
  return rank;
}

// The step from one rank to another, modulo the number of values, as an unsigned code: 1, -1, 2, -2 ... -> small ones.
// 0 is no step of a whole element, so it has no code; of nibbles each may stay.
template <typename U, DeltaOrder O>
MXMOE_INLINE U step_code(U from, U to) {
  if constexpr (O == DeltaOrder::kNibbles) return U(((to - from) & 0x0f) | ((to & 0xf0) - (from & 0xf0)));
  using S = std::make_signed_t<U>;
  const S step = S(U(to - from));
  return U((U(step) << 1) ^ U(step >> (8 * sizeof(U) - 1))) - 1;
}
template <typename U, DeltaOrder O>
MXMOE_INLINE U stepped(U from, U code, bool backwards) {
  if constexpr (O == DeltaOrder::kNibbles) {
    const U low = U(backwards ? from - code : from + code),
            high = U(backwards ? from - (code & 0xf0) : from + (code & 0xf0));
    return U((low & 0x0f) | (high & 0xf0));
  }
  const U zigzag = U(code + 1), step = U(zigzag >> 1) ^ U(-(zigzag & 1));
  return U(backwards ? from - step : from + step);
}

template <typename F>
void with_order(const DeltaArgs& a, F&& f) {
  const auto typed = [&]<typename U>() {
    if (a.order == DeltaOrder::kPlain) return f.template operator()<U, DeltaOrder::kPlain>();
    if (a.order == DeltaOrder::kSignMagnitude) return f.template operator()<U, DeltaOrder::kSignMagnitude>();
    if constexpr (sizeof(U) == 1) return f.template operator()<U, DeltaOrder::kNibbles>();
  };
  if (a.width == 1) return typed.template operator()<uint8_t>();
  if (a.width == 2) return typed.template operator()<uint16_t>();
  return typed.template operator()<uint32_t>();
}

int64_t chunks_of(const DeltaArgs& a) {
  return (a.numel + kDeltaChunk - 1) / kDeltaChunk;
}
int64_t length_of(const DeltaArgs& a, int64_t chunk) {
  const int64_t left = a.numel - chunk * kDeltaChunk;
  return left < kDeltaChunk ? left : kDeltaChunk;
}

template <typename U>
void count_chunk(const DeltaArgs& a, int64_t chunk) {
  const int64_t first = chunk * kDeltaChunk;
  int64_t last = -1, changes = 0, bytes = 0;
  for_each_change(static_cast<const U*>(a.before) + first, static_cast<const U*>(a.after) + first, length_of(a, chunk),
                  [&](int64_t i) {
                    bytes += (i - last - 1) / kGapEscape + 1;
                    last = i, ++changes;
                  });
  a.changes[chunk] = int32_t(changes), a.gap_bytes[chunk] = int32_t(bytes);
}

template <typename U, DeltaOrder O>
void encode_chunk(const DeltaArgs& a, int64_t chunk) {
  const int64_t first = chunk * kDeltaChunk, total = a.first_change[chunks_of(a)];
  const U *before = static_cast<const U*>(a.before) + first, *after = static_cast<const U*>(a.after) + first;
  uint8_t *gap = a.gaps + a.first_gap[chunk], *step = a.steps + a.first_change[chunk];
  // Counted before: a tensor that changed since then may not write past its place.
  const uint8_t *gap_end = a.gaps + a.first_gap[chunk + 1], *step_end = a.steps + a.first_change[chunk + 1];
  int64_t last = -1;
  for_each_change(before, after, length_of(a, chunk), [&](int64_t i) {
    int64_t skipped = i - last - 1;
    if (step == step_end || gap + skipped / kGapEscape >= gap_end) return;
    for (; skipped >= kGapEscape; skipped -= kGapEscape) *gap++ = kGapEscape;
    *gap++ = uint8_t(skipped);
    const U code = step_code<U, O>(rank_of<U, O>(before[i]), rank_of<U, O>(after[i]));
    for (size_t byte = 0; byte < sizeof(U); ++byte) step[byte * total] = uint8_t(code >> (8 * byte));
    ++step, last = i;
  });
}

bool chunk_valid(const DeltaArgs& a, int64_t chunk) {
  const uint8_t *gap = a.gaps + a.first_gap[chunk], *end = a.gaps + a.first_gap[chunk + 1];
  int64_t at = -1, changes = 0;
  bool open = false;  // an escape asks for another byte
  for (; gap < end; ++gap) {
    open = *gap == kGapEscape;
    at += *gap + !open;
    changes += !open;
  }
  return !open && at < length_of(a, chunk) && changes == a.first_change[chunk + 1] - a.first_change[chunk];
}

template <typename U, DeltaOrder O>
void apply_chunk(const DeltaArgs& a, int64_t chunk) {
  U* target = static_cast<U*>(a.target) + chunk * kDeltaChunk;
  const int64_t total = a.first_change[chunks_of(a)];
  const uint8_t *gap = a.gaps + a.first_gap[chunk], *end = a.gaps + a.first_gap[chunk + 1];
  const uint8_t* step = a.steps + a.first_change[chunk];
  for (int64_t at = -1; gap < end; ++gap) {
    at += *gap;
    if (*gap == kGapEscape) continue;
    ++at;
    U code = 0;
    for (size_t byte = 0; byte < sizeof(U); ++byte) code |= U(U{step[byte * total]} << (8 * byte));
    target[at] = bits_of<U, O>(stepped<U, O>(rank_of<U, O>(target[at]), code, a.backwards));
    ++step;
  }
}

}  // namespace

void delta_count(const DeltaArgs& a, int threads) {
  with_order(a, [&]<typename U, DeltaOrder O>() {
    parallel(threads, chunks_of(a), [&](int64_t chunk, int) { count_chunk<U>(a, chunk); });
  });
}

void delta_encode(const DeltaArgs& a, int threads) {
  with_order(a, [&]<typename U, DeltaOrder O>() {
    parallel(threads, chunks_of(a), [&](int64_t chunk, int) { encode_chunk<U, O>(a, chunk); });
  });
}

bool delta_valid(const DeltaArgs& a, int threads) {
  std::atomic<bool> valid{true};
  parallel(threads, chunks_of(a), [&](int64_t chunk, int) {
    if (!chunk_valid(a, chunk)) valid.store(false, std::memory_order_relaxed);
  });
  return valid.load();
}

void delta_apply(const DeltaArgs& a, int threads) {
  with_order(a, [&]<typename U, DeltaOrder O>() {
    parallel(threads, chunks_of(a), [&](int64_t chunk, int) { apply_chunk<U, O>(a, chunk); });
  });
}

}  // namespace mxmoe::host::MXMOE_ISA
