// decode_int4: a group's 16 bytes -> 32 integers -> times its scale in FP32 -> rounded to the output's dtype.
#include "host/decode.h"
#include "host/elements.h"
#include "host/int4.h"
#include "host/threads.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

constexpr int64_t kGroupsAtOnce = 1024;  // of a task

template <DType D>
float scalar(const stored<D>* p) {
  if constexpr (D == DType::kF32) return *p;
  return D == DType::kBF16 ? f32_of_bf16(*p) : f32_of_f16(*p);
}

template <DType S, DType D>
void decode_groups(const uint8_t* packed, const stored<S>* scale, stored<D>* out, int64_t groups) {
  uint8_t codes[kInt4Group];
  for (int64_t g = 0; g < groups; ++g) {
    const f32 factor = splat(scalar<S>(scale + g));
    unpack_pairs(packed + g * kInt4Group / 2, kInt4Group / 2, codes);
    for (int i = 0; i < kInt4Group; i += kLanes) {
      const f32 q = __builtin_convertvector((i32)widen(load<u8q>(codes + i)) - 8, f32);
      store_elements<D>(out + g * kInt4Group + i, q * factor);
    }
  }
}

}  // namespace

void decode_int4(const Int4Args& a, int threads) {
  const int64_t groups = a.scale.sizes[0] * a.scale.sizes[1], tasks = (groups + kGroupsAtOnce - 1) / kGroupsAtOnce;
  with_dtype(a.scale.dtype, [&]<DType S>() {
    with_dtype(a.out.dtype, [&]<DType D>() {
      parallel(threads, tasks, [&](int64_t task, int) {
        const int64_t first = task * kGroupsAtOnce, left = groups - first;
        decode_groups<S, D>(a.packed + first * kInt4Group / 2, a.scale.ptr<stored<S>>() + first,
                            a.out.ptr<stored<D>>() + first * kInt4Group, left < kGroupsAtOnce ? left : kGroupsAtOnce);
      });
    });
  });
}

}  // namespace mxmoe::host::MXMOE_ISA
