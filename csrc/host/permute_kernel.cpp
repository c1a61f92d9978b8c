// permute, unpermute and unpermute_backward: rows move between token order and expert order.
#include "config.h"
#include "host/elements.h"
#include "host/exp.h"
#include "host/rows.h"
#include "host/threads.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

constexpr int64_t kTaskBytes = 1 << 18;  // of one task
constexpr int64_t kAhead = 512;          // elements: prefetch distance within a row (Zen 4: 15 -> 28 GB/s a thread)

MXMOE_INLINE int64_t element_bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : dtype == DType::kU8 ? 1 : 2;
}
MXMOE_INLINE int64_t min_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}
MXMOE_INLINE int64_t rows_per_task(int64_t row_bytes) {
  return row_bytes >= kTaskBytes ? 1 : kTaskBytes / (row_bytes + 1);
}

// Runs body(row) for every row, in tasks of about kTaskBytes.
template <typename F>
MXMOE_INLINE void for_rows(int threads, int64_t rows, int64_t row_bytes, F&& body) {
  const int64_t step = rows_per_task(row_bytes);
  parallel(threads, (rows + step - 1) / step, [&](int64_t task, int) {
    for (int64_t row = task * step; row < min_of(rows, (task + 1) * step); ++row) body(row);
#if defined(__x86_64__)
    _mm_sfence();  // streaming stores become visible before the task counts as done
#endif
  });
}

// A whole vector of elements, past the cache where asked to; then p is aligned to it.
template <DType D>
MXMOE_INLINE void put_elements(stored<D>* p, f32 x, [[maybe_unused]] bool stream) {
#if defined(MXMOE_ISA_AVX512)
  if (stream && D == DType::kF32) return _mm512_stream_ps(reinterpret_cast<float*>(p), (__m512)x);
  if (stream && D == DType::kBF16) return _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)bf16_from_f32(x));
#endif
  store_elements<D>(p, x);
}

template <DType Y, DType O>
void unpermute_token(const Tensor& y, const int32_t* rows, const int32_t* next_rows, const float* weights,
                     int64_t top_k, int64_t width, bool stream, stored<O>* out) {
  stream = stream && reinterpret_cast<uintptr_t>(out) % 64 == 0;
  constexpr int kUnroll = 4, kStep = kUnroll * kLanes;
  auto row_at = [&](int64_t row) { return y.ptr<const stored<Y>>() + row * y.strides[0]; };
  auto row = [&](int64_t k) { return row_at(rows[k]); };
  auto weighted = [&](int64_t k, f32 x) { return weights ? weights[k] * x : x; };
  int64_t j = 0;
  for (; j + kStep <= width; j += kStep) {
    f32 sum[kUnroll] = {};
    const bool inside = j + kAhead < width;  // else the next token's rows begin
    const int32_t* rows_ahead = inside ? rows : next_rows;
    const int64_t ahead = inside ? j + kAhead : j + kAhead - width;
    for (int64_t k = 0; k < top_k; ++k) {
      const stored<Y>* soon = row_at(rows_ahead[k]) + ahead;
      for (int i = 0; i < kStep; i += 64 / static_cast<int>(sizeof(stored<Y>))) __builtin_prefetch(soon + i);
      if (rows[k] < 0) continue;
      const stored<Y>* from = row(k) + j;
      for (int i = 0; i < kUnroll; ++i) sum[i] += weighted(k, load_elements<Y>(from + i * kLanes));
    }
    for (int i = 0; i < kUnroll; ++i) put_elements<O>(out + j + i * kLanes, sum[i], stream);
  }
  for (; j < width; j += kLanes) {
    const int n = static_cast<int>(min_of(kLanes, width - j));
    f32 sum = {};
    for (int64_t k = 0; k < top_k; ++k)
      if (rows[k] >= 0) sum += weighted(k, load_elements<Y>(row(k) + j, n));
    store_elements<O>(out + j, sum, n);
  }
}

template <DType Y, DType O>
void unpermute_rows(const Tensor& y, const Tensor& inverse, const Tensor& weights, const Tensor& out, int threads) {
  const int64_t top_k = inverse.sizes[1], width = out.sizes[1];
  const bool stream = bypasses_cache(out.sizes[0] * width * sizeof(stored<O>));
  for_rows(threads, out.sizes[0], top_k * width * sizeof(stored<Y>), [&](int64_t t) {
    const float* w = weights ? weights.ptr<const float>() + t * top_k : nullptr;
    const int32_t* rows = inverse.ptr<const int32_t>() + t * top_k;
    unpermute_token<Y, O>(y, rows, t + 1 < out.sizes[0] ? rows + top_k : rows, w, top_k, width, stream,
                          out.ptr<stored<O>>() + t * out.strides[0]);
  });
}

// grad = rounded(weight * dy), where wanted; returns dot(dy, y) in the order of LaneSum, 0 without y.
template <DType X, DType Y, DType O>
float backward_row(const stored<X>* dy, const stored<Y>* y, float weight, int64_t width, stored<O>* grad) {
  LaneSum sum;
  for (int64_t j = 0; j < width; j += LaneSum::kWidth)
    for (int i = 0; i < LaneSum::kVectors && j + i * kLanes < width; ++i) {
      const int64_t at = j + i * kLanes;
      const int n = static_cast<int>(min_of(kLanes, width - at));
      f32 g = load_some<X>(dy + at, n);
      if (y) sum.lanes[i] += g * load_some<Y>(y + at, n);
      if (grad) store_some<O>(grad + at, weight * g, n);
    }
  return LaneSum::tree(sum);
}

// rows_grad absent: only the dots.
template <DType X, DType Y, DType O>
void backward_rows(const Tensor& dy, const Tensor& y, const Tensor& permutation, const Tensor& weights,
                   const Tensor& rows_grad, const Tensor& weights_grad, int threads) {
  const int64_t rows = permutation.sizes[0], width = dy.sizes[1], top_k = dy.sizes[0] ? rows / dy.sizes[0] : 1;
  const bool dot = y && weights_grad;
  if (weights_grad) memset(weights_grad.data, 0, rows * sizeof(float));
  if (!dot && !rows_grad) return;
  for_rows(threads, rows, width * sizeof(stored<X>) * 3, [&](int64_t n) {
    const int64_t slot = permutation.ptr<const int32_t>()[n];
    stored<O>* grad = rows_grad ? rows_grad.ptr<stored<O>>() + n * rows_grad.strides[0] : nullptr;
    if (slot < 0) {
      if (grad) memset(grad, 0, width * sizeof(stored<O>));
      return;
    }
    const stored<Y>* y_row = dot ? y.ptr<const stored<Y>>() + n * y.strides[0] : nullptr;
    const float weight = weights ? weights.ptr<const float>()[slot] : 1.0f;
    float product =
        backward_row<X, Y, O>(dy.ptr<const stored<X>>() + slot / top_k * dy.strides[0], y_row, weight, width, grad);
    if (dot) weights_grad.ptr<float>()[slot] = product;
  });
}

// What the sources of rows read.
struct Gather {
  const Tensor &tokens, &permutation, &weights;
  int64_t top_k;

  int64_t slot(int64_t row) const { return permutation.ptr<const int32_t>()[row]; }
  const char* token(int64_t slot, int64_t col) const {
    return tokens.ptr<const char>() + (slot / top_k * tokens.strides[0] + col) * element_bytes(tokens.dtype);
  }
};

void fill_rows(const void* context, int64_t row, int64_t rows, int64_t col, int64_t cols, void* out) {
  const auto& in = *static_cast<const Gather*>(context);
  const int64_t bytes = cols * element_bytes(in.tokens.dtype);
  char* to = static_cast<char*>(out);
  for (int64_t n = row; n < row + rows; ++n, to += bytes) {
    const int64_t slot = in.slot(n);
    if (slot < 0)
      memset(to, 0, bytes);
    else
      memcpy(to, in.token(slot, col), bytes);
  }
}

template <DType X, DType O>
void fill_rows_grad(const void* context, int64_t row, int64_t rows, int64_t col, int64_t cols, void* out) {
  const auto& in = *static_cast<const Gather*>(context);
  auto* to = static_cast<stored<O>*>(out);
  for (int64_t n = row; n < row + rows; ++n, to += cols) {
    const int64_t slot = in.slot(n);
    const float weight = slot >= 0 && in.weights ? in.weights.ptr<const float>()[slot] : 1.0f;
    if (slot < 0)
      memset(to, 0, cols * sizeof(*to));
    else
      backward_row<X, X, O>(reinterpret_cast<const stored<X>*>(in.token(slot, col)), nullptr, weight, cols, to);
  }
}

}  // namespace

void permute(const Tensor& x, const Tensor& permutation, int64_t top_k, const Tensor& out, const QuantizeArgs* copies,
             int threads) {
  if (copies) {
    const Gather gather{x, permutation, {}, top_k};
    return quantize_from(*copies, {&fill_rows, &gather}, threads);
  }
  const int64_t size = element_bytes(x.dtype), row_bytes = out.sizes[1] * size;
  const bool stream = bypasses_cache(out.sizes[0] * row_bytes) && row_bytes >= 512;
  for_rows(threads, out.sizes[0], row_bytes, [&](int64_t n) {
    char* to = out.ptr<char>() + n * out.strides[0] * size;
    const int64_t slot = permutation.ptr<const int32_t>()[n];
    if (slot < 0) {
      memset(to, 0, row_bytes);
      return;
    }
    const char* from = x.ptr<const char>() + slot / top_k * x.strides[0] * size;
    if (stream)
      stream_copy(to, from, row_bytes);
    else
      memcpy(to, from, row_bytes);
  });
}

void unpermute(const Tensor& y, const Tensor& inverse, const Tensor& weights, const Tensor& out, int threads) {
  with_dtype(y.dtype, [&]<DType Y>() {
    with_dtype(out.dtype, [&]<DType O>() { unpermute_rows<Y, O>(y, inverse, weights, out, threads); });
  });
}

void unpermute_backward(const Tensor& dy, const Tensor& y, const Tensor& permutation, const Tensor& weights,
                        const Tensor& rows_grad, const Tensor& weights_grad, const QuantizeArgs* copies, int threads) {
  with_dtype(dy.dtype, [&]<DType X>() {
    with_dtype(copies ? copies->x.dtype : rows_grad.dtype, [&]<DType O>() {
      with_dtype(y ? y.dtype : dy.dtype, [&]<DType Y>() {
        backward_rows<X, Y, O>(dy, y, permutation, weights, rows_grad, weights_grad, threads);
      });
      if (!copies) return;
      const int64_t top_k = dy.sizes[0] ? permutation.sizes[0] / dy.sizes[0] : 1;
      const Gather gather{dy, permutation, weights, top_k};
      quantize_from(*copies, {&fill_rows_grad<X, O>, &gather}, threads);
    });
  });
}

}  // namespace mxmoe::host::MXMOE_ISA
