// swiglu and swiglu_backward: one pass over the rows, kLanes (gate, up) pairs at a time.
#include "host/elements.h"
#include "host/exp.h"
#include "host/rows.h"
#include "host/threads.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

constexpr int64_t kTaskElements = 1 << 15;  // gate and up elements of one task

MXMOE_INLINE int64_t min_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}
MXMOE_INLINE f32 at_most(f32 x, float limit) {
  return x > limit ? splat(limit) : x;
}  // keeps NaN
MXMOE_INLINE f32 at_least(f32 x, float limit) {
  return x < limit ? splat(limit) : x;
}

struct Terms {
  f32 g, s, gate, up;  // clamped g, sigmoid(alpha * g), g * s, clamped u + offset
};

MXMOE_INLINE Terms terms(f32 g, f32 u, const Activation& a) {
  if (a.has_limit) g = at_most(g, a.limit), u = at_least(at_most(u, a.limit), -a.limit);
  f32 s = sigmoid(a.alpha == 1.0f ? g : g * a.alpha);
  return {g, s, g * s, a.offset == 0.0f ? u : u + a.offset};
}

// dg and du for the gradient of the product; 0 where a clamp cut.
MXMOE_INLINE void gradients(f32 da, f32& g, f32& u, const Activation& a) {
  Terms t = terms(g, u, a);
  f32 scaled = a.alpha == 1.0f ? t.g : t.g * a.alpha;
  f32 dg = (da * t.up) * (t.s * (1.0f + scaled * (1.0f - t.s))), du = da * t.gate;
  if (a.has_limit) {
    dg = g > a.limit ? f32{} : dg;
    du = u > a.limit ? f32{} : u < -a.limit ? f32{} : du;
  }
  g = dg, u = du;
}

// Gate and up of row `h`, pairs j .. j + n; n < kLanes only in the last step of a row.
template <DType D, bool kInterleaved>
MXMOE_INLINE void load_gate_up(const stored<D>* h, int64_t width, int64_t j, int n, f32& g, f32& u) {
  if constexpr (kInterleaved) {
    if (n == kLanes) return load_pairs<D>(h + 2 * j, g, u);
    stored<D> part[2 * kLanes] = {};
    memcpy(part, h + 2 * j, 2 * n * sizeof(*h));
    load_pairs<D>(part, g, u);
  } else {
    g = n == kLanes ? load_elements<D>(h + j) : load_elements<D>(h + j, n);
    u = n == kLanes ? load_elements<D>(h + width + j) : load_elements<D>(h + width + j, n);
  }
}

template <DType D, bool kInterleaved>
MXMOE_INLINE void store_gate_up(stored<D>* h, int64_t width, int64_t j, int n, f32 g, f32 u) {
  if constexpr (kInterleaved) {
    if (n == kLanes) return store_pairs<D>(h + 2 * j, g, u);
    stored<D> part[2 * kLanes];
    store_pairs<D>(part, g, u);
    memcpy(h + 2 * j, part, 2 * n * sizeof(*h));
  } else if (n == kLanes) {
    store_elements<D>(h + j, g), store_elements<D>(h + width + j, u);
  } else {
    store_elements<D>(h + j, g, n), store_elements<D>(h + width + j, u, n);
  }
}

template <DType D, bool kInterleaved>
void swiglu_row(const stored<D>* h, int64_t width, const Activation& activation, stored<D>* out) {
  for (int64_t j = 0; j < width; j += kLanes) {
    const int n = static_cast<int>(min_of(kLanes, width - j));
    f32 g, u;
    load_gate_up<D, kInterleaved>(h, width, j, n, g, u);
    Terms t = terms(g, u, activation);
    if (n == kLanes)
      store_elements<D>(out + j, t.gate * t.up);
    else
      store_elements<D>(out + j, t.gate * t.up, n);
  }
}

template <DType D, bool kInterleaved>
void backward_row(const stored<D>* da, const stored<D>* h, int64_t width, const Activation& activation, stored<D>* dh) {
  for (int64_t j = 0; j < width; j += kLanes) {
    const int n = static_cast<int>(min_of(kLanes, width - j));
    f32 g, u;
    load_gate_up<D, kInterleaved>(h, width, j, n, g, u);
    gradients(n == kLanes ? load_elements<D>(da + j) : load_elements<D>(da + j, n), g, u, activation);
    store_gate_up<D, kInterleaved>(dh, width, j, n, g, u);
  }
}

// body.operator()<D, kInterleaved>(row) for the rows before offs[-1]; the others of `out` become zero.
template <typename F>
MXMOE_INLINE void for_rows(const Tensor& h, const Tensor& offs, bool interleaved, const Tensor& out, int threads,
                           F&& body) {
  const int64_t rows = h.sizes[0], groups = offs ? offs.sizes[0] : 0;
  const int64_t used = groups ? min_of(rows, offs.ptr<const int32_t>()[groups - 1]) : rows;
  const int64_t step = h.sizes[1] >= kTaskElements ? 1 : kTaskElements / (h.sizes[1] + 1);
  with_dtype(h.dtype, [&]<DType D>() {
    parallel(threads, (rows + step - 1) / step, [&](int64_t task, int) {
      for (int64_t row = task * step; row < min_of(rows, (task + 1) * step); ++row) {
        if (row >= used)
          memset(out.ptr<stored<D>>() + row * out.strides[0], 0, out.sizes[1] * sizeof(stored<D>));
        else if (interleaved)
          body.template operator()<D, true>(row);
        else
          body.template operator()<D, false>(row);
      }
    });
  });
}

template <DType D>
MXMOE_INLINE stored<D>* row_of(const Tensor& t, int64_t row) {
  return t.ptr<stored<D>>() + row * t.strides[0];
}

}  // namespace

void swiglu(const Tensor& h, const Tensor& offs, const Activation& activation, bool interleaved, const Tensor& out,
            int threads) {
  for_rows(h, offs, interleaved, out, threads, [&]<DType D, bool kInterleaved>(int64_t row) {
    swiglu_row<D, kInterleaved>(row_of<D>(h, row), out.sizes[1], activation, row_of<D>(out, row));
  });
}

void swiglu_backward(const Tensor& da, const Tensor& h, const Tensor& offs, const Activation& activation,
                     bool interleaved, const Tensor& dh, int threads) {
  for_rows(h, offs, interleaved, dh, threads, [&]<DType D, bool kInterleaved>(int64_t row) {
    backward_row<D, kInterleaved>(row_of<D>(da, row), row_of<D>(h, row), da.sizes[1], activation, row_of<D>(dh, row));
  });
}

}  // namespace mxmoe::host::MXMOE_ISA
