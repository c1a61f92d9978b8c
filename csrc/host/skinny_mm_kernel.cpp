// grouped_mm of a few rows per group: every line of B is read once, turned and decoded in registers and multiplied
// there, so that the time is that of reading B. The bits are grouped_gemm's: one accumulator per output, pairs in
// ascending order.
#include "host/gemm/pack.h"
#include "host/gemm/tile.h"
#include "host/threads.h"

namespace mxmoe::host::MXMOE_ISA {
#if defined(MXMOE_ISA_AVX512)
namespace {

constexpr int kTileLines = 16;  // of B; its outputs are the lanes of an accumulator
constexpr int kTiles = 2;       // multiplied side by side: a chain of vdpbf16ps alone waits for itself
constexpr int kUnitLines = kTiles * kTileLines;
constexpr int kRowsAtOnce = 4, kMaxRows = 8;
constexpr int64_t kTasksPerThread = 8;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// 16 lines of B, decoded 32 elements at a time.
template <Element E>
class LineTile {
 public:
  static constexpr int kBits = E == Element::kBF16 ? 16 : is_packed(E) ? 4 : 8;

  LineTile(const LineFormat& f, const Lines& lines, int64_t line0)
      : values_(lines.values + line0 * f.line_stride),
        scales_(lines.scales + line0 * f.scale_stride),
        stride_(f.line_stride),
        scale_stride_(f.scale_stride) {}

  __attribute__((always_inline)) void decode(int64_t k, int64_t contraction, __m512i steps[16]) {
    if constexpr (E == Element::kBF16) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) steps[i] = _mm512_loadu_si512(values_ + i * stride_ + 2 * k);
      transpose16(steps);
    } else {
      constexpr int64_t kSpan = 16 * block_of(E);  // elements that 16 scales cover
      if (k % kSpan == 0) {
        const int64_t blocks = (contraction - k) / block_of(E);
        __m512i z[4];
        load_lanes<false>(scales_ + k / block_of(E), scale_stride_, kTileLines,
                          first_bytes(static_cast<int>(blocks < 16 ? blocks : 16)), z);
        turn_bytes(z);
        turned_.set_scales(z);
      }
      turned_.template decode<true>(at<E>(values_, 1, k), stride_, kTileLines, 32, static_cast<int>(k % kSpan / 32),
                                    steps);
    }
  }

 private:
  struct Nothing {};
  const uint8_t *values_, *scales_;
  int64_t stride_, scale_stride_;
  std::conditional_t<E == Element::kBF16, Nothing, TurnedLines<E == Element::kBF16 ? Element::kMxE4M3 : E>> turned_;
};

template <Element E>
class SkinnyGemm {
 public:
  explicit SkinnyGemm(const GemmProblem& problem) : p_(problem), units_(problem.outputs / kUnitLines) {}

  // False where a line has to take grouped_gemm's FP32 path.
  bool run() {
    int64_t rows = 0, words = 0;
    for (int64_t e = 0; e < p_.num_groups; ++e) {
      GemmGroup& g = p_.groups[e];
      in_place_ &= PairStep::in_place(p_.a, g.contraction);
      g.first_row = rows, rows += g.rows, words = g.contraction / 2 > words ? g.contraction / 2 : words;
    }
    row_words_ = words;
    if (!in_place_ && !pack_rows(rows)) return false;
    tasks_ = p_.num_threads * kTasksPerThread;
    parallel(p_.num_threads, tasks_, [&](int64_t task, int) { multiply_units(task); });
    return !wide_;
  }

 private:
  bool pack_rows(int64_t rows) {
    packed_ = static_cast<uint32_t*>(workspace(WorkspaceSlot::kA, rows * row_words_ * 4));
    for (int64_t e = 0; e < p_.num_groups; ++e) {
      const GemmGroup& g = p_.groups[e];
      if (PairStep::is_wide(p_.a, g.a, 0, static_cast<int>(g.rows), g.contraction)) return false;
      PairStep::rows(p_.a, g.a, 0, static_cast<int>(g.rows), 0, g.contraction, packed_ + g.first_row * row_words_,
                     row_words_);
    }
    return true;
  }

  int64_t first_unit(int64_t task) const { return units_ * p_.num_groups * task / tasks_; }

  const uint8_t* values_of(int64_t unit) const {
    return p_.groups[unit / units_].b.values + unit % units_ * kUnitLines * p_.b.line_stride;
  }

  void multiply_units(int64_t task) {
    const int64_t begin = first_unit(task), end = first_unit(task + 1);
    for (int64_t unit = begin; unit < end && !__atomic_load_n(&wide_, __ATOMIC_RELAXED); ++unit) {
      // After the last one: what this thread is likely to take next.
      int64_t next = unit + 1 < end ? unit + 1 : first_unit(task + p_.num_threads);
      if (task + p_.num_threads >= tasks_ && unit + 1 == end) next = -1;
      Ahead ahead;
      if (next >= 0) ahead = {values_of(next), values_of(next) + kUnitLines * p_.b.line_stride};
      const GemmGroup& g = p_.groups[unit / units_];
      const int64_t line = unit % units_ * kUnitLines;
      if (is_wide<E>(p_.b, g.b, line, kUnitLines, g.contraction)) {
        __atomic_store_n(&wide_, true, __ATOMIC_RELAXED);
        return;
      }
      for (int64_t row = 0; row < g.rows; row += kRowsAtOnce) {
        switch (g.rows - row) {
          case 1:
            multiply<1>(g, row, line, ahead);
            break;
          case 2:
            multiply<2>(g, row, line, ahead);
            break;
          case 3:
            multiply<3>(g, row, line, ahead);
            break;
          default:
            multiply<4>(g, row, line, ahead);
        }
      }
    }
  }

  template <int R>
  void multiply(const GemmGroup& g, int64_t row0, int64_t line, Ahead& ahead) const {
    const uint8_t* row[R];
    for (int r = 0; r < R; ++r)
      row[r] = in_place_ ? g.a.values + (row0 + r) * p_.a.line_stride
                         : reinterpret_cast<const uint8_t*>(packed_ + (g.first_row + row0 + r) * row_words_);
    LineTile<E> tiles[kTiles] = {{p_.b, g.b, line}, {p_.b, g.b, line + kTileLines}};
    f32 sum[kTiles][R] = {};
    const int64_t contraction = g.contraction;
    for (int64_t k = 0; k < contraction; k += 32) {
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) {
        ahead.fetch(LineTile<E>::kBits);  // as many cache lines as are decoded
        __m512i steps[16];
        tiles[t].decode(k, contraction, steps);
#pragma GCC unroll 16
        for (int s = 0; s < 16; ++s)
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            uint32_t word;
            memcpy(&word, row[r] + 2 * k + 4 * s, 4);
            sum[t][r] = PairStep::multiply_add(sum[t][r], splat_u32(word), (f32)steps[s]);
          }
      }
    }
    with_dtype(p_.out_dtype, [&]<DType D>() {
      for (int t = 0; t < kTiles; ++t)
        for (int r = 0; r < R; ++r) store_tile<D>(g, row0 + r, line + t * kTileLines, sum[t][r]);
    });
  }

  // 16 outputs of a row: times the global scales, plus bias, rounded once.
  template <DType D>
  void store_tile(const GemmGroup& g, int64_t row, int64_t column, f32 x) const {
    if (g.a.global) x *= splat(g.a.global[row * p_.a.global_stride]);
    if (g.b.global) x *= load_strided(g.b.global + column * p_.b.global_stride, p_.b.global_stride, kLanes);
    if (g.bias) x += load<f32>(g.bias + column);
    store_elements<D>(reinterpret_cast<stored<D>*>(g.out) + row * p_.out_stride + column, x);
  }

  const GemmProblem& p_;
  const int64_t units_;  // of a group
  int64_t tasks_ = 0, row_words_ = 0;
  uint32_t* packed_ = nullptr;
  bool in_place_ = true, wide_ = false;
};

bool takes(const GemmProblem& p) {
  const auto in_pairs = [](const LineFormat& f) {
    return !f.line_major && f.element != Element::kF32 && f.element != Element::kF16;
  };
  if (!in_pairs(p.a) || !in_pairs(p.b) || p.accumulate || p.outputs % kUnitLines) return false;
  for (int64_t e = 0; e < p.num_groups; ++e)
    if (p.groups[e].rows > kMaxRows || p.groups[e].contraction % 32) return false;
  return true;
}

}  // namespace

bool skinny_gemm(const GemmProblem& problem) {
  if (!takes(problem)) return false;
  bool done = false;
  PairStep::for_pair_element(problem.b.element, [&]<Element E>() { done = SkinnyGemm<E>(problem).run(); });
  return done;
}

#else

bool skinny_gemm(const GemmProblem&) {
  return false;
}

#endif
}  // namespace mxmoe::host::MXMOE_ISA
