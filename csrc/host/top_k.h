// The largest of a row of keys, in order.
#pragma once
#include "host/simd.h"

namespace mxmoe::host::MXMOE_ISA {

constexpr int32_t kNoKey = INT32_MIN + 1;  // below every key; one less is still a number

// Candidates collect in index order; when there is no room for more, they are put in order and the best `top_k` stay.
class TopK {
 public:
  static constexpr int64_t memory_size(int64_t top_k) { return 5 * padded(top_k); }  // of int32_t

  TopK(int32_t* memory, int64_t top_k)
      : top_k_(top_k),
        keys_(memory),
        ids_(keys_ + padded(top_k)),
        ordered_keys_(ids_ + padded(top_k)),
        ordered_ids_(ordered_keys_ + padded(top_k)),
        places_(ordered_ids_ + padded(top_k)) {}

  // ids[k] = index of the k-th largest of keys[0 .. width), the lower one of a tie; width is a multiple of 32, and at
  // least top_k keys are above kNoKey.
  void select(const int32_t* keys, int64_t width, int32_t* ids) {
    if (top_k_ <= kMaxima) bound(keys, width);
    for (int64_t at = 0; at < width; at += kLanes) {
      collect(load<i32>(keys + at), at);
      if (count_ > top_k_ + kRoom) order();
    }
    order();
    memcpy(ids, ids_, top_k_ * sizeof(int32_t));
  }

 private:
  static constexpr int kMaxima = 16;
  static constexpr int64_t kRoom = 32;
  static constexpr int64_t padded(int64_t top_k) { return (top_k + kRoom) / 16 * 16 + 48; }  // and two vectors

  // The limit to begin with: of 16 maxima over disjoint keys, top_k reach the top_k-th.
  void bound(const int32_t* keys, int64_t width) {
    i32 most[kMaxima / kLanes];
    for (i32& m : most) m = kNoKey + (i32{});
    for (int64_t at = 0; at < width; at += kMaxima)
      for (int i = 0; i < kMaxima / kLanes; ++i) {
        i32 key = load<i32>(keys + at + i * kLanes);
        most[i] = key > most[i] ? key : most[i];
      }
    for (int i = 0; i < kMaxima / kLanes; ++i) store(keys_ + i * kLanes, most[i]);
    count_ = kMaxima;
    order();
    count_ = 0;
    if (limit_ > kNoKey) --limit_;
  }

  // Appends the keys above the limit.
  void collect(i32 key, int64_t first_id) {
    auto above = key > limit_;
#if defined(MXMOE_ISA_AVX512)
    const __mmask16 mask = _mm512_movepi32_mask((__m512i)above);
    const i32 id = lane_indices() + static_cast<int32_t>(first_id);
    _mm512_storeu_si512(keys_ + count_, _mm512_maskz_compress_epi32(mask, (__m512i)key));
    _mm512_storeu_si512(ids_ + count_, _mm512_maskz_compress_epi32(mask, (__m512i)id));
    count_ += __builtin_popcount(mask);
#else
    if (!any_above((u32)above, 0)) return;
    for (int i = 0; i < kLanes; ++i) {
      keys_[count_] = key[i];
      ids_[count_] = static_cast<int32_t>(first_id) + i;
      count_ += above[i] != 0;
    }
#endif
  }

  // Each goes to the place that is the number of those ahead of it: larger ones, and equal ones before it.
  void order() {
    const i32 lane = lane_indices();
    store(keys_ + count_, kNoKey + (i32{}));
    for (int64_t i = 0; i < count_; i += kLanes) {
      const i32 own = load<i32>(keys_ + i);
      i32 place = {};
      int64_t j = 0;
      for (; j < i; ++j) place -= keys_[j] >= own;
      for (; j < i + kLanes && j < count_; ++j) place -= keys_[j] > own + (lane > static_cast<int32_t>(j - i));
      for (; j < count_; ++j) place -= keys_[j] > own;
      store(places_ + i, place);
    }
    for (int64_t i = 0; i < count_; ++i) {
      ordered_keys_[places_[i]] = keys_[i];
      ordered_ids_[places_[i]] = ids_[i];
    }
    swap(keys_, ordered_keys_);
    swap(ids_, ordered_ids_);
    if (count_ < top_k_) return;
    count_ = top_k_;
    limit_ = keys_[top_k_ - 1];
  }

  void swap(int32_t*& a, int32_t*& b) {
    int32_t* other = a;
    a = b, b = other;
  }

  int64_t top_k_, count_ = 0;
  int32_t limit_ = kNoKey;
  int32_t *keys_, *ids_, *ordered_keys_, *ordered_ids_, *places_;
};

}  // namespace mxmoe::host::MXMOE_ISA
