// grouped_mm and grouped_mm_wgrad. Phase 1 packs A once. Phase 2 hands out (group, chunk of rows, panel of outputs):
// pack the panel into L2, multiply the chunk with it tile by tile, finish each tile while it is in L1. Contractions
// longer than a panel's block keep their accumulators between blocks.
#include "config.h"
#include "host/gemm/tile.h"
#include "host/threads.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

static_assert(kPanel == kPanelLines);

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}
constexpr int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// A of one group as the micro-kernel reads it.
struct PackedRows {
  const uint8_t* base;
  int64_t row_stride;    // bytes; of rows
  int64_t panel_stride;  // bytes; of panels, 0: rows

  const uint8_t* row(int64_t r, int64_t step) const {
    if (!panel_stride) return base + r * row_stride + step * 4;
    return base + r / kPanel * panel_stride + (step * kPanel + r % kPanel) * 4;
  }
};

struct ThreadScratch {
  uint32_t* panel;  // (block_steps, 64)
  float* acc;       // (chunk_rows, 64)
  uint32_t* rows;   // (kTileRows, block_steps): FP32 rows decoded on the fly
  int32_t* list;    // (chunk_rows,): the rows that take part
};

template <class Step>
class Gemm {
 public:
  explicit Gemm(const GemmProblem& problem)
      : p_(problem), config_(pick_config(problem.l2_bytes)), panels_(ceil_div(problem.outputs, kPanel)) {}

  void run() {
    lay_out();
    packed_ = static_cast<uint8_t*>(workspace(WorkspaceSlot::kA, packed_bytes_));
    wide_rows_ = static_cast<uint8_t*>(workspace(WorkspaceSlot::kB, num_rows_));
    if (!a_in_place_) parallel(p_.num_threads, num_packs_, [&](int64_t task, int) { pack(task); });
    parallel(p_.num_threads, num_units_, [&](int64_t task, int) { unit(task); });
  }

 private:
  bool a_in_panels() const { return p_.a.line_major; }
  static int64_t steps_of(const GemmGroup& g) { return ceil_div(g.contraction, Step::kPerStep); }
  // Words; one cache line more than a multiple of 64 bytes, so that rows do not share their cache sets.
  static int64_t packed_row_words(const GemmGroup& g) { return round_up(steps_of(g), 16) + 16; }

  void lay_out() {
    for (int64_t e = 0; e < p_.num_groups; ++e) a_in_place_ &= Step::in_place(p_.a, p_.groups[e].contraction);
    for (int64_t e = 0; e < p_.num_groups; ++e) {
      GemmGroup& g = p_.groups[e];
      g.first_row = num_rows_, g.packed_bytes = packed_bytes_, g.first_pack = num_packs_, g.first_unit = num_units_;
      const int64_t blocks = ceil_div(g.rows, kPanel);
      num_rows_ += g.rows;
      num_packs_ += blocks;
      num_units_ += ceil_div(g.rows, config_.chunk_rows) * panels_;
      if (a_in_place_) continue;
      packed_bytes_ += a_in_panels() ? blocks * steps_of(g) * kPanel * 4 : g.rows * packed_row_words(g) * 4;
    }
  }

  // The group that holds a task: the last one whose first task is not after it.
  const GemmGroup& find(int64_t task, int64_t GemmGroup::* first) const {
    int64_t low = 0, high = p_.num_groups;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (p_.groups[middle].*first <= task ? low : high) = middle;
    }
    return p_.groups[low];
  }

  PackedRows packed(const GemmGroup& g) const {
    if (a_in_place_) return {g.a.values, p_.a.line_stride, 0};
    const uint8_t* base = packed_ + g.packed_bytes;
    return a_in_panels() ? PackedRows{base, 0, steps_of(g) * kPanel * 4} : PackedRows{base, packed_row_words(g) * 4, 0};
  }

  void pack(int64_t task) {
    const GemmGroup& g = find(task, &GemmGroup::first_pack);
    const int64_t block = task - g.first_pack, row0 = block * kPanel;
    const int num_rows = static_cast<int>(smaller(kPanel, g.rows - row0));
    uint32_t* out = reinterpret_cast<uint32_t*>(packed_ + g.packed_bytes);
    if (a_in_panels()) {
      Step::panel(p_.a, g.a, row0, num_rows, 0, g.contraction, out + block * steps_of(g) * kPanel);
    } else {
      const int64_t stride = packed_row_words(g);
      Step::rows(p_.a, g.a, row0, num_rows, 0, g.contraction, out + row0 * stride, stride);
    }
    for (int i = 0; i < num_rows; ++i)
      wide_rows_[g.first_row + row0 + i] = Step::is_wide(p_.a, g.a, row0 + i, g.contraction);
  }

  ThreadScratch scratch() const {
    const int64_t panel_bytes = config_.block_steps * kPanel * 4, acc_bytes = config_.chunk_rows * kPanel * 4;
    const int64_t row_bytes = kTileRows * config_.block_steps * 4;
    auto* base = static_cast<uint8_t*>(
        workspace(WorkspaceSlot::kThread, panel_bytes + acc_bytes + row_bytes + 4 * config_.chunk_rows));
    return {reinterpret_cast<uint32_t*>(base), reinterpret_cast<float*>(base + panel_bytes),
            reinterpret_cast<uint32_t*>(base + panel_bytes + acc_bytes),
            reinterpret_cast<int32_t*>(base + panel_bytes + acc_bytes + row_bytes)};
  }

  void unit(int64_t task) {
    const GemmGroup& g = find(task, &GemmGroup::first_unit);
    const int64_t chunk = (task - g.first_unit) / panels_, column0 = (task - g.first_unit) % panels_ * kPanel;
    const int64_t row0 = chunk * config_.chunk_rows, rows = smaller(config_.chunk_rows, g.rows - row0);
    const int columns = static_cast<int>(smaller(kPanel, p_.outputs - column0));
    const ThreadScratch s = scratch();
    const PackedRows a = packed(g);

    bool wide_panel = false;
    for (int j = 0; j < columns && !wide_panel; ++j) wide_panel = Step::is_wide(p_.b, g.b, column0 + j, g.contraction);
    int narrow = 0;
    for (int64_t r = row0; r < row0 + rows; ++r)
      if (!wide_panel && (a_in_place_ || !wide_rows_[g.first_row + r])) s.list[narrow++] = static_cast<int32_t>(r);
    if (narrow > 0) multiply<Step>(g, &a, s.list, narrow, column0, columns, s);
    if (narrow == rows) return;

    int wide = 0;
    for (int64_t r = row0; r < row0 + rows; ++r)
      if (wide_panel || wide_rows_[g.first_row + r]) s.list[wide++] = static_cast<int32_t>(r);
    multiply<FloatStep>(g, nullptr, s.list, wide, column0, columns, s);
  }

  // The listed rows times one panel. a == nullptr: the rows are decoded to FP32 here.
  template <class S>
  void multiply(const GemmGroup& g, const PackedRows* a, const int32_t* list, int count, int64_t column0, int columns,
                const ThreadScratch& s) const {
    const int64_t steps_total = ceil_div(g.contraction, S::kPerStep);
    int64_t done = 0;
    do {
      const int64_t steps = smaller(config_.block_steps, steps_total - done), k0 = done * S::kPerStep;
      const int64_t k = smaller(steps * S::kPerStep, g.contraction - k0);
      S::panel(p_.b, g.b, column0, columns, k0, k, s.panel);
      const bool last = done + steps == steps_total;
      for (int t = 0; t < count; t += kTileRows) {
        const int num_rows = static_cast<int>(smaller(kTileRows, count - t));
        TileRows tile;
        tile.step_stride = a && a->panel_stride ? kPanel * 4 : 4;
        for (int i = 0; i < num_rows; ++i) {
          if (a) {
            tile.row[i] = a->row(list[t + i], done);
          } else {
            uint32_t* row = s.rows + i * config_.block_steps;
            FloatStep::rows(p_.a, g.a, list[t + i], 1, k0, k, row, 0);
            tile.row[i] = reinterpret_cast<const uint8_t*>(row);
          }
        }
        float* acc =
            s.acc + (last && done == 0 ? 0 : t * kPanel);  // one tile's worth stays in L1 where there is one block
        multiply_tile<S>(num_rows, tile, s.panel, steps, acc, done > 0);
        if (!last) continue;
        with_dtype(p_.out_dtype, [&]<DType D>() {
          for (int i = 0; i < num_rows; ++i) finish_row<D>(p_, g, list[t + i], column0, columns, acc + i * kPanel);
        });
      }
      done += steps;
    } while (done < steps_total);
  }

  const GemmProblem& p_;
  const HostGemmConfig config_;
  const int64_t panels_;
  int64_t num_rows_ = 0, packed_bytes_ = 0, num_packs_ = 0, num_units_ = 0;
  bool a_in_place_ = true;
  uint8_t *packed_ = nullptr, *wide_rows_ = nullptr;
};

}  // namespace

void grouped_gemm(const GemmProblem& problem) {
#if defined(MXMOE_ISA_AVX512)
  const auto float_only = [](Element e) { return e == Element::kF32 || e == Element::kF16; };
  if (!float_only(problem.a.element) && !float_only(problem.b.element)) return Gemm<PairStep>(problem).run();
#endif
  Gemm<FloatStep>(problem).run();
}

}  // namespace mxmoe::host::MXMOE_ISA
