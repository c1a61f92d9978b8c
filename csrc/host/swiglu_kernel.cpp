// swiglu and swiglu_backward: one pass over the rows, kLanes (gate, up) pairs at a time.
#include "host/elements.h"
#include "host/exp.h"
#include "host/rows.h"
#include "host/threads.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

constexpr int64_t kTaskElements = 1 << 15;        // gate and up elements of one task
constexpr int64_t kAhead = 1024, kRowsAhead = 3;  // elements along a row, rows down a strip: prefetch distances
constexpr Activation kSilu{1.0f, 0.0f, 0.0f, false};

MXMOE_INLINE int64_t min_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}
MXMOE_INLINE f32 at_most(f32 x, float limit) {
  return x > limit ? splat(limit) : x;
}  // keeps NaN
MXMOE_INLINE f32 at_least(f32 x, float limit) {
  return x < limit ? splat(limit) : x;
}

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

// Pairs of a step. Its vectors come in twos, which hold 2 * kLanes pairs in an order that all arrays of a row share.
constexpr int kVectors = kLanes == 16 ? 8 : 4;
constexpr int64_t kTwo = 2 * kLanes, kStep = kVectors * kLanes;

// An array of one value per pair.
template <DType D, bool kInterleaved>
MXMOE_INLINE void load_step(const stored<D>* p, f32 (&x)[kVectors]) {
  for (int i = 0; i < kVectors; i += 2, p += kTwo)
    if constexpr (kInterleaved)
      x[i] = load_elements<D>(p), x[i + 1] = load_elements<D>(p + kLanes);
    else
      load_two<D>(p, x[i], x[i + 1]);
}
template <DType D, bool kInterleaved>
MXMOE_INLINE void store_step(stored<D>* p, const f32 (&x)[kVectors]) {
  for (int i = 0; i < kVectors; i += 2, p += kTwo)
    if constexpr (kInterleaved)
      store_elements<D>(p, x[i]), store_elements<D>(p + kLanes, x[i + 1]);
    else
      store_two<D>(p, x[i], x[i + 1]);
}
template <DType D>
MXMOE_INLINE void prefetch_step(const stored<D>* p) {
  for (int64_t i = 0; i < kStep; i += 64 / static_cast<int64_t>(sizeof(*p))) __builtin_prefetch(p + i);
}

// Gate and up of a row: apart, or taking turns in one array.
template <DType D, bool kInterleaved>
struct Halves {
  stored<D>*gate, *up;

  // Of row `h`, from pair `first` on.
  MXMOE_INLINE Halves of(stored<D>* h, int64_t width, int64_t first) {
    if (kInterleaved) return {h + 2 * first, nullptr};
    return {h + first, h + width + first};
  }

  __attribute__((always_inline)) Halves from(int64_t j) const {
    if (kInterleaved) return {gate + 2 * j, nullptr};
    return {gate + j, up + j};
  }

  __attribute__((always_inline)) void load(f32 (&g)[kVectors], f32 (&u)[kVectors]) const {
    if constexpr (kInterleaved) {
      for (int i = 0; i < kVectors; ++i) load_pairs<D>(gate + i * kTwo, g[i], u[i]);
    } else {
      load_step<D, false>(gate, g), load_step<D, false>(up, u);
    }
  }

  __attribute__((always_inline)) void store(const f32 (&g)[kVectors], const f32 (&u)[kVectors]) const {
    if constexpr (kInterleaved) {
      for (int i = 0; i < kVectors; ++i) store_pairs<D>(gate + i * kTwo, g[i], u[i]);
    } else {
      store_step<D, false>(gate, g), store_step<D, false>(up, u);
    }
  }

  __attribute__((always_inline)) void prefetch(int64_t ahead) const {
    prefetch_step<D>(gate + ahead), prefetch_step<D>((kInterleaved ? gate + kStep : up) + ahead);
  }

  // The first n < kStep pairs.
  __attribute__((always_inline)) void copy_to(const Halves& to, int64_t n) const {
    memcpy(to.gate, gate, (kInterleaved ? 2 : 1) * n * sizeof(*gate));
    if (!kInterleaved) memcpy(to.up, up, n * sizeof(*up));
  }
};

template <DType D, bool kInterleaved>
MXMOE_INLINE void swiglu_step(const Halves<D, kInterleaved>& h, const Activation& activation, stored<D>* out) {
  f32 g[kVectors], u[kVectors];
  h.load(g, u);
  const Terms<kVectors> t = terms(g, u, activation);
  for (int i = 0; i < kVectors; ++i) u[i] = t.gate[i] * t.up[i];
  store_step<D, kInterleaved>(out, u);
}

// h_ahead: elements to what will be read some hundred cycles later.
template <DType D, bool kInterleaved, bool kPlain>
void swiglu_row(Halves<D, kInterleaved> h, int64_t h_ahead, int64_t pairs, const Activation& options, stored<D>* out) {
  const Activation activation = kPlain ? kSilu : options;
  int64_t j = 0;
  for (; j + kStep <= pairs; j += kStep) {
    h.from(j).prefetch(h_ahead);
    swiglu_step(h.from(j), activation, out + j);
  }
  if (j == pairs) return;
  stored<D> h_rest[2 * kStep] = {}, rest[kStep];
  const Halves<D, kInterleaved> part{h_rest, h_rest + kStep};
  h.from(j).copy_to(part, pairs - j);
  swiglu_step(part, activation, rest);
  memcpy(out + j, rest, (pairs - j) * sizeof(*out));
}

template <DType D, bool kInterleaved>
MXMOE_INLINE void backward_step(const stored<D>* da, const Halves<D, kInterleaved>& h, const Activation& activation,
                                const Halves<D, kInterleaved>& dh) {
  f32 g[kVectors], u[kVectors], d[kVectors];
  load_step<D, kInterleaved>(da, d);
  h.load(g, u);
  gradients(d, g, u, activation);
  dh.store(g, u);
}

template <DType D, bool kInterleaved, bool kPlain>
void backward_row(const stored<D>* da, int64_t da_ahead, Halves<D, kInterleaved> h, int64_t h_ahead, int64_t pairs,
                  const Activation& options, Halves<D, kInterleaved> dh) {
  const Activation activation = kPlain ? kSilu : options;
  int64_t j = 0;
  for (; j + kStep <= pairs; j += kStep) {
    prefetch_step<D>(da + j + da_ahead);
    h.from(j).prefetch(h_ahead);
    backward_step(da + j, h.from(j), activation, dh.from(j));
  }
  if (j == pairs) return;
  stored<D> da_rest[kStep] = {}, h_rest[2 * kStep] = {}, dh_rest[2 * kStep];
  const Halves<D, kInterleaved> part{h_rest, h_rest + kStep}, dh_part{dh_rest, dh_rest + kStep};
  memcpy(da_rest, da + j, (pairs - j) * sizeof(*da));
  h.from(j).copy_to(part, pairs - j);
  backward_step(da_rest, part, activation, dh_part);
  dh_part.copy_to(dh.from(j), pairs - j);
}

// body.operator()<D, kInterleaved, kPlain>(); plain: the activation is silu(g) * u.
template <typename F>
MXMOE_INLINE void with_variant(DType dtype, bool interleaved, const Activation& a, F&& body) {
  const bool plain = a.alpha == kSilu.alpha && a.offset == kSilu.offset && !a.has_limit;
  with_dtype(dtype, [&]<DType D>() {
    if (interleaved)
      plain ? body.template operator()<D, true, true>() : body.template operator()<D, true, false>();
    else
      plain ? body.template operator()<D, false, true>() : body.template operator()<D, false, false>();
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

template <DType D, bool kInterleaved, bool kPlain>
void fill_swiglu(const void* context, int64_t row, int64_t rows, int64_t col, int64_t cols, void* out) {
  const auto& in = *static_cast<const Inputs*>(context);
  const int64_t width = in.h.sizes[1] / 2;
  for (int64_t r = 0; r < rows; ++r)
    swiglu_row<D, kInterleaved, kPlain>(Halves<D, kInterleaved>::of(row_of<D>(in.h, row + r), width, col),
                                        kRowsAhead * in.h.strides[0], cols, in.activation,
                                        static_cast<stored<D>*>(out) + r * cols);
}

// Concatenated: columns of gate, and the same of up as the second part.
template <DType D, bool kInterleaved, bool kPlain>
void fill_backward(const void* context, int64_t row, int64_t rows, int64_t col, int64_t cols, void* out) {
  using H = Halves<D, kInterleaved>;
  const auto& in = *static_cast<const Inputs*>(context);
  const int64_t width = in.da.sizes[1], first = kInterleaved ? col / 2 : col, pairs = kInterleaved ? cols / 2 : cols;
  for (int64_t r = 0; r < rows; ++r) {
    auto* dh = static_cast<stored<D>*>(out) + r * cols;
    backward_row<D, kInterleaved, kPlain>(row_of<D>(in.da, row + r) + first, kRowsAhead * in.da.strides[0],
                                          H::of(row_of<D>(in.h, row + r), width, first), kRowsAhead * in.h.strides[0],
                                          pairs, in.activation, H{dh, dh + rows * cols});
  }
}

}  // namespace

void swiglu(const Tensor& h, const Tensor& offs, const Activation& activation, bool interleaved, const Tensor& out,
            const QuantizeArgs* copies, int threads) {
  with_variant(h.dtype, interleaved, activation, [&]<DType D, bool kInterleaved, bool kPlain>() {
    if (copies) {
      const Inputs inputs{h, h, activation};
      return quantize_from(*copies, {&fill_swiglu<D, kInterleaved, kPlain>, &inputs}, threads);
    }
    for_rows<D>(h.sizes[1], offs, out, threads, [&](int64_t row) {
      swiglu_row<D, kInterleaved, kPlain>(Halves<D, kInterleaved>::of(row_of<D>(h, row), out.sizes[1], 0), kAhead,
                                          out.sizes[1], activation, row_of<D>(out, row));
    });
  });
}

void swiglu_backward(const Tensor& da, const Tensor& h, const Tensor& offs, const Activation& activation,
                     bool interleaved, const Tensor& dh, const QuantizeArgs* copies, int threads) {
  with_variant(h.dtype, interleaved, activation, [&]<DType D, bool kInterleaved, bool kPlain>() {
    using H = Halves<D, kInterleaved>;
    if (copies) {
      const Inputs inputs{h, da, activation};
      return quantize_from(*copies, {&fill_backward<D, kInterleaved, kPlain>, &inputs, kInterleaved ? 1 : 2}, threads);
    }
    const int64_t width = da.sizes[1];
    for_rows<D>(h.sizes[1], offs, dh, threads, [&](int64_t row) {
      backward_row<D, kInterleaved, kPlain>(row_of<D>(da, row), kAhead, H::of(row_of<D>(h, row), width, 0), kAhead,
                                            width, activation, H::of(row_of<D>(dh, row), width, 0));
    });
  });
}

}  // namespace mxmoe::host::MXMOE_ISA
