// swiglu and swiglu_backward: one pass over the rows, kLanes (gate, up) pairs at a time.
#include "host/elements.h"
#include "host/exp.h"
#include "host/rows.h"
#include "host/threads.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

constexpr int64_t kTaskElements = 1 << 15;        // gate and up elements of one task
constexpr int64_t kAhead = 1024, kRowsAhead = 3;  // elements along a row, rows down a strip: prefetch distances

MXMOE_INLINE int64_t min_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}
MXMOE_INLINE f32 at_most(f32 x, float limit) {
  return x > limit ? splat(limit) : x;
}  // keeps NaN
MXMOE_INLINE f32 at_least(f32 x, float limit) {
  return x < limit ? splat(limit) : x;
}

constexpr int kTogether = 4;  // vectors

// Of N vectors of (gate, up) pairs.
template <int N>
struct Terms {
  f32 g[N], s[N], gate[N], up[N];  // clamped g, sigmoid(alpha * g), g * s, clamped u + offset
};

template <int N>
MXMOE_INLINE Terms<N> terms(const f32 (&g)[N], const f32 (&u)[N], const Activation& a) {
  Terms<N> t;
  for (int i = 0; i < N; ++i) {
    t.g[i] = a.has_limit ? at_most(g[i], a.limit) : g[i];
    t.up[i] = a.has_limit ? at_least(at_most(u[i], a.limit), -a.limit) : u[i];
    t.s[i] = a.alpha == 1.0f ? t.g[i] : t.g[i] * a.alpha;
  }
  sigmoid(t.s);
  for (int i = 0; i < N; ++i) {
    t.gate[i] = t.g[i] * t.s[i];
    if (a.offset != 0.0f) t.up[i] = t.up[i] + a.offset;
  }
  return t;
}

// dg and du for the gradient of the product; 0 where a clamp cut.
template <int N>
MXMOE_INLINE void gradients(const f32 (&da)[N], f32 (&g)[N], f32 (&u)[N], const Activation& a) {
  const Terms<N> t = terms(g, u, a);
  for (int i = 0; i < N; ++i) {
    f32 scaled = a.alpha == 1.0f ? t.g[i] : t.g[i] * a.alpha;
    f32 dg = (da[i] * t.up[i]) * (t.s[i] * (1.0f + scaled * (1.0f - t.s[i]))), du = da[i] * t.gate[i];
    if (a.has_limit) {
      dg = g[i] > a.limit ? f32{} : dg;
      du = u[i] > a.limit ? f32{} : u[i] < -a.limit ? f32{} : du;
    }
    g[i] = dg, u[i] = du;
  }
}

// Gate and up of a row: apart, or taking turns in one array.
template <DType D, bool kInterleaved>
struct Halves {
  stored<D>*gate, *up;
  int64_t ahead;  // elements to what will be read some hundred cycles later

  // Of row `h`, from pair `first` on.
  MXMOE_INLINE Halves of(stored<D>* h, int64_t width, int64_t first, int64_t ahead) {
    if (kInterleaved) return {h + 2 * first, nullptr, ahead};
    return {h + first, h + width + first, ahead};
  }

  // Pairs j .. j + n; n < kLanes only in the last step of a row.
  __attribute__((always_inline)) void load(int64_t j, int n, f32& g, f32& u) const {
    __builtin_prefetch(gate + (kInterleaved ? 2 * j : j) + ahead);
    if (!kInterleaved) __builtin_prefetch(up + j + ahead);
    if constexpr (kInterleaved) {
      if (n == kLanes) return load_pairs<D>(gate + 2 * j, g, u);
      stored<D> part[2 * kLanes] = {};
      memcpy(part, gate + 2 * j, 2 * n * sizeof(*gate));
      load_pairs<D>(part, g, u);
    } else {
      g = load_some<D>(gate + j, n), u = load_some<D>(up + j, n);
    }
  }

  __attribute__((always_inline)) void store(int64_t j, int n, f32 g, f32 u) const {
    if constexpr (kInterleaved) {
      if (n == kLanes) return store_pairs<D>(gate + 2 * j, g, u);
      stored<D> part[2 * kLanes];
      store_pairs<D>(part, g, u);
      memcpy(gate + 2 * j, part, 2 * n * sizeof(*gate));
    } else {
      store_some<D>(gate + j, g, n), store_some<D>(up + j, u, n);
    }
  }
};

// step.operator()<N>(j, n) for pairs j .. j + N * kLanes; n <= kLanes of each vector, a constant but in the last step.
template <typename F>
MXMOE_INLINE void for_pairs(int64_t pairs, F&& step) {
  int64_t j = 0;
  for (; j + kTogether * kLanes <= pairs; j += kTogether * kLanes) step.template operator()<kTogether>(j, kLanes);
  for (; j < pairs; j += kLanes) step.template operator()<1>(j, static_cast<int>(min_of(kLanes, pairs - j)));
}

template <DType D, bool kInterleaved>
void swiglu_row(Halves<D, kInterleaved> h, int64_t pairs, const Activation activation, stored<D>* out) {
  for_pairs(pairs, [&]<int N>(int64_t j, int n) __attribute__((always_inline)) {
    f32 g[N], u[N];
    for (int i = 0; i < N; ++i) h.load(j + i * kLanes, n, g[i], u[i]);
    const Terms<N> t = terms(g, u, activation);
    for (int i = 0; i < N; ++i) store_some<D>(out + j + i * kLanes, t.gate[i] * t.up[i], n);
  });
}

template <DType D, bool kInterleaved>
void backward_row(const stored<D>* da, int64_t da_ahead, Halves<D, kInterleaved> h, int64_t pairs,
                  const Activation activation, Halves<D, kInterleaved> dh) {
  for_pairs(pairs, [&]<int N>(int64_t j, int n) __attribute__((always_inline)) {
    f32 g[N], u[N], d[N];
    for (int i = 0; i < N; ++i) {
      __builtin_prefetch(da + j + i * kLanes + da_ahead);
      d[i] = load_some<D>(da + j + i * kLanes, n);
      h.load(j + i * kLanes, n, g[i], u[i]);
    }
    gradients(d, g, u, activation);
    for (int i = 0; i < N; ++i) dh.store(j + i * kLanes, n, g[i], u[i]);
  });
}

// body.operator()<D, kInterleaved>().
template <typename F>
MXMOE_INLINE void with_layout(DType dtype, bool interleaved, F&& body) {
  with_dtype(dtype, [&]<DType D>() {
    if (interleaved)
      body.template operator()<D, true>();
    else
      body.template operator()<D, false>();
  });
}

// body(row) for the rows before offs[-1]; the others of `out` become zero.
template <DType D, typename F>
MXMOE_INLINE void for_rows(int64_t h_cols, const Tensor& offs, const Tensor& out, int threads, F&& body) {
  const int64_t rows = out.sizes[0], groups = offs ? offs.sizes[0] : 0;
  const int64_t used = groups ? min_of(rows, offs.ptr<const int32_t>()[groups - 1]) : rows;
  const int64_t step = h_cols >= kTaskElements ? 1 : kTaskElements / (h_cols + 1);
  parallel(threads, (rows + step - 1) / step, [&](int64_t task, int) {
    for (int64_t row = task * step; row < min_of(rows, (task + 1) * step); ++row) {
      if (row < used)
        body(row);
      else
        memset(out.ptr<stored<D>>() + row * out.strides[0], 0, out.sizes[1] * sizeof(stored<D>));
    }
  });
}

template <DType D>
MXMOE_INLINE stored<D>* row_of(const Tensor& t, int64_t row) {
  return t.ptr<stored<D>>() + row * t.strides[0];
}

// What the sources of rows read.
struct Inputs {
  const Tensor &h, &da;
  const Activation& activation;
};

template <DType D, bool kInterleaved>
void fill_swiglu(const void* context, int64_t row, int64_t rows, int64_t col, int64_t cols, void* out) {
  const auto& in = *static_cast<const Inputs*>(context);
  const int64_t width = in.h.sizes[1] / 2;
  for (int64_t r = 0; r < rows; ++r)
    swiglu_row<D>(Halves<D, kInterleaved>::of(row_of<D>(in.h, row + r), width, col, kRowsAhead * in.h.strides[0]), cols,
                  in.activation, static_cast<stored<D>*>(out) + r * cols);
}

// Concatenated: columns of gate, and the same of up as the second part.
template <DType D, bool kInterleaved>
void fill_backward(const void* context, int64_t row, int64_t rows, int64_t col, int64_t cols, void* out) {
  using H = Halves<D, kInterleaved>;
  const auto& in = *static_cast<const Inputs*>(context);
  const int64_t width = in.da.sizes[1], first = kInterleaved ? col / 2 : col, pairs = kInterleaved ? cols / 2 : cols;
  for (int64_t r = 0; r < rows; ++r) {
    auto* dh = static_cast<stored<D>*>(out) + r * cols;
    backward_row<D>(row_of<D>(in.da, row + r) + first, kRowsAhead * in.da.strides[0],
                    H::of(row_of<D>(in.h, row + r), width, first, kRowsAhead * in.h.strides[0]), pairs, in.activation,
                    H{dh, dh + rows * cols, 0});
  }
}

}  // namespace

void swiglu(const Tensor& h, const Tensor& offs, const Activation& activation, bool interleaved, const Tensor& out,
            const QuantizeArgs* copies, int threads) {
  with_layout(h.dtype, interleaved, [&]<DType D, bool kInterleaved>() {
    if (copies) {
      const Inputs inputs{h, h, activation};
      return quantize_from(*copies, {&fill_swiglu<D, kInterleaved>, &inputs}, threads);
    }
    for_rows<D>(h.sizes[1], offs, out, threads, [&](int64_t row) {
      swiglu_row<D>(Halves<D, kInterleaved>::of(row_of<D>(h, row), out.sizes[1], 0, kAhead), out.sizes[1], activation,
                    row_of<D>(out, row));
    });
  });
}

void swiglu_backward(const Tensor& da, const Tensor& h, const Tensor& offs, const Activation& activation,
                     bool interleaved, const Tensor& dh, const QuantizeArgs* copies, int threads) {
  with_layout(h.dtype, interleaved, [&]<DType D, bool kInterleaved>() {
    using H = Halves<D, kInterleaved>;
    if (copies) {
      const Inputs inputs{h, da, activation};
      return quantize_from(*copies, {&fill_backward<D, kInterleaved>, &inputs, kInterleaved ? 1 : 2}, threads);
    }
    const int64_t width = da.sizes[1];
    for_rows<D>(h.sizes[1], offs, dh, threads, [&](int64_t row) {
      backward_row<D>(row_of<D>(da, row), kAhead, H::of(row_of<D>(h, row), width, 0, kAhead), width, activation,
                      H::of(row_of<D>(dh, row), width, 0, 0));
    });
  });
}

}  // namespace mxmoe::host::MXMOE_ISA
