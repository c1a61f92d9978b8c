// grouped_mm and grouped_mm_wgrad. Phase 1 packs A once, unless the tasks of phase 2 do. Phase 2 hands out (group,
// chunk of rows, run of panels): pack a panel (several where they are short) into L2, multiply the chunk with it tile
// by tile while the next one is fetched, finish each tile while it is in L1. Contractions longer than a panel's block
// keep their accumulators between blocks. Chunks whose rows fill panels swap the operands: see gemm/swapped.h.
#include "config.h"
#include "host/gemm/swapped.h"
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
constexpr int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

// A of one group, or of some of its panels from first_row on, as the micro-kernel reads it.
struct PackedRows {
  const uint8_t* base;
  int64_t row_stride;    // bytes; of rows
  int64_t panel_stride;  // bytes; of panels, 0: rows
  int64_t first_row;
  int64_t panel_rows = kPanel;

  const uint8_t* row(int64_t r, int64_t step) const {
    if (!panel_stride) return base + r * row_stride + step * 4;
    r -= first_row;
    return base + r / panel_rows * panel_stride + (step * kPanel + r % panel_rows) * 4;
  }
};

struct ThreadScratch {
  uint32_t* panels;  // block_panels x (steps, 64)
  float* acc;        // (chunk_rows, 64); swapped: see finish_panel
  uint32_t* rows;    // (kTileRows, block_steps): FP32 rows decoded on the fly; swapped: lines of B
  int32_t* list;     // (chunk_rows,): row indices
  uint32_t* a;       // chunk_rows / 64 x (steps, 64): panels of A that are not packed before
};

template <class Step>
class Gemm {
 public:
  explicit Gemm(const GemmProblem& problem) : p_(problem), panels_(ceil_div(problem.outputs, kPanel)) {}

  void run() {
    lay_out();
    packed_ = static_cast<uint8_t*>(workspace(WorkspaceSlot::kA, packed_bytes_));
    wide_rows_ = static_cast<uint8_t*>(workspace(WorkspaceSlot::kB, num_rows_));
    if (!a_in_place_) parallel(p_.num_threads, num_packs_, [&](int64_t task, int) { pack(task); });
    parallel(p_.num_threads, num_tasks_, [&](int64_t task, int) { multiply_chunk(task); });
  }

 private:
  int64_t out_size() const { return p_.out_dtype == DType::kF32 ? 4 : 2; }
  bool a_in_panels() const { return p_.a.line_major; }
  // Panels of A of a short contraction are packed by the task that multiplies them with several panels of B: they do
  // not leave L2. So are those of swapped operands.
  bool packs_late(const HostGemmConfig& c) const {
    return (a_in_panels() && c.block_panels >= kLatePanels) || swaps(c);
  }
  static bool swaps(const HostGemmConfig& c) { return Step::kSwaps && c.swapped; }
  // Of A's vectors in each panel of a swapped chunk: panels alike.
  static int64_t vectors_of(int64_t rows) {
    const int64_t vectors = ceil_div(rows, kLanes);
    return ceil_div(vectors, ceil_div(vectors, kPanelVectors));
  }
  static int64_t steps_of(const GemmGroup& g) { return ceil_div(g.contraction, Step::kPerStep); }
  // Words; one cache line more than a multiple of 64 bytes, so that rows do not share their cache sets.
  static int64_t packed_row_words(const GemmGroup& g) { return round_up(steps_of(g), 16) + 16; }

  void lay_out() {
    int64_t work = 0, out_bytes = 0;
    bool aligned = p_.out_stride * out_size() % 64 == 0;
    for (int64_t e = 0; e < p_.num_groups; ++e) {
      const GemmGroup& g = p_.groups[e];
      a_in_place_ &= Step::in_place(p_.a, g.contraction);
      aligned &= reinterpret_cast<uintptr_t>(g.out) % 64 == 0;
      work += g.rows * panels_ * steps_of(g);
      out_bytes += g.rows * p_.outputs * out_size();
    }
    stream_ = aligned && !p_.accumulate && bypasses_cache(out_bytes);
    // BF16 lines gain where groups are alike, and not where they are not.
    const bool may_swap = Step::kSwaps && is_scaled(p_.b.element) && !p_.b.line_major && !p_.b.panels && !p_.accumulate;
    int64_t left = work;
    for (int64_t e = 0; e < p_.num_groups; ++e) {
      GemmGroup& g = p_.groups[e];
      const int64_t task_work = smaller(work / kTasksPerThread, left / kLastTasks) / p_.num_threads;
      g.config = pick_config(p_.l2_bytes, g.rows, p_.outputs, steps_of(g), task_work, may_swap);
      left -= g.rows * panels_ * steps_of(g);
      g.first_row = num_rows_, g.packed_bytes = packed_bytes_, g.first_pack = num_packs_, g.first_task = num_tasks_;
      const bool late = packs_late(g.config);
      if (late && !swaps(g.config)) {
        const int64_t most = larger(p_.l2_bytes / 4 / (kPanel * 4) / larger(steps_of(g), 1), 1) * kPanel;
        g.config.chunk_rows = smaller(round_up(g.config.chunk_rows, kPanel), most);
      }
      const int64_t blocks = ceil_div(g.rows, kPanel);
      num_rows_ += g.rows;
      num_tasks_ += ceil_div(g.rows, g.config.chunk_rows) * ceil_div(panels_, g.config.run_panels);
      if (a_in_place_ || late) continue;
      num_packs_ += blocks;
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

  // ahead: what the task reads after it.
  PackedRows packed(const GemmGroup& g, int64_t row0, int rows, const ThreadScratch& s, Ahead ahead) const {
    if (packs_late(g.config)) {
      const int64_t panel_words = steps_of(g) * kPanel;
      const int64_t panel_rows = swaps(g.config) ? vectors_of(rows) * kLanes : kPanel;
      for (int64_t r = 0; r < rows; r += panel_rows)
        Step::panel(p_.a, g.a, row0 + r, static_cast<int>(smaller(panel_rows, rows - r)), 0, g.contraction,
                    s.a + r / panel_rows * panel_words, ahead);
      return {reinterpret_cast<uint8_t*>(s.a), 0, panel_words * 4, row0, panel_rows};
    }
    if (a_in_place_) return {g.a.values, p_.a.line_stride, 0, 0};
    const uint8_t* base = packed_ + g.packed_bytes;
    return a_in_panels() ? PackedRows{base, 0, steps_of(g) * kPanel * 4, 0}
                         : PackedRows{base, packed_row_words(g) * 4, 0, 0};
  }

  void pack(int64_t task) {
    const GemmGroup& g = find(task, &GemmGroup::first_pack);
    const int64_t block = task - g.first_pack, row0 = block * kPanel;
    const int num_rows = static_cast<int>(smaller(kPanel, g.rows - row0));
    uint32_t* out = reinterpret_cast<uint32_t*>(packed_ + g.packed_bytes);
    if (a_in_panels()) {
      Ahead none;
      Step::panel(p_.a, g.a, row0, num_rows, 0, g.contraction, out + block * steps_of(g) * kPanel, none);
    } else {
      const int64_t stride = packed_row_words(g);
      Step::rows(p_.a, g.a, row0, num_rows, 0, g.contraction, out + row0 * stride, stride);
    }
    for (int i = 0; i < num_rows; ++i)
      wide_rows_[g.first_row + row0 + i] = Step::is_wide(p_.a, g.a, row0 + i, 1, g.contraction);
  }

  ThreadScratch scratch(const GemmGroup& g) const {
    const HostGemmConfig& c = g.config;
    const int64_t chunk_rows = round_up(c.chunk_rows, kPanel);
    const int64_t panel_bytes = c.block_steps * kPanel * 4, acc_bytes = chunk_rows * kPanel * 4;
    const int64_t row_bytes = larger(kTileRows * c.block_steps, Step::kSwaps ? 2 * kLineBuffer : 0) * 4,
                  list_bytes = 4 * chunk_rows;
    const int64_t a_bytes = packs_late(c) ? chunk_rows * steps_of(g) * 4 : 0;
    auto* base = static_cast<uint8_t*>(
        workspace(WorkspaceSlot::kThread, panel_bytes + acc_bytes + row_bytes + list_bytes + a_bytes));
    return {reinterpret_cast<uint32_t*>(base), reinterpret_cast<float*>(base + panel_bytes),
            reinterpret_cast<uint32_t*>(base + panel_bytes + acc_bytes),
            reinterpret_cast<int32_t*>(base + panel_bytes + acc_bytes + row_bytes),
            reinterpret_cast<uint32_t*>(base + panel_bytes + acc_bytes + row_bytes + list_bytes)};
  }

  int columns_of(int64_t panel) const { return static_cast<int>(smaller(kPanel, p_.outputs - panel * kPanel)); }

  bool panel_is_wide(const GemmGroup& g, int64_t panel) const {
    return Step::is_wide(p_.b, g.b, panel * kPanel, columns_of(panel), g.contraction);
  }

  // What panels first, first + 1, ... of B are made from, where that is one piece of memory and read in one go.
  Ahead source(const GemmGroup& g, int64_t first, int64_t num_panels) const {
    const int64_t lines = smaller(num_panels * kPanel, p_.outputs - first * kPanel), stride = p_.b.line_stride;
    if (lines <= 0 || p_.b.line_major || steps_of(g) > g.config.block_steps) return {};
    if (stride > g.contraction * larger(p_.b.k_stride, 1)) return {};
    const uint8_t* begin = g.b.values + first * kPanel * stride;
    return {begin, begin + lines * stride};
  }

  // Results of the listed rows begin .. end, where that is one piece of memory.
  Ahead results(const GemmGroup& g, const int32_t* list, int begin, int end, int64_t num_panels) const {
    const int64_t stride = p_.out_stride * out_size();
    if (begin >= end || num_panels < panels_ || p_.out_stride > p_.outputs) return {};
    return {g.out + list[begin] * stride, g.out + (list[end - 1] + 1) * stride};
  }

  void multiply_chunk(int64_t task) const {
    const GemmGroup& g = find(task, &GemmGroup::first_task);
    const HostGemmConfig& c = g.config;
    const int64_t runs = ceil_div(panels_, c.run_panels), run = task - g.first_task;
    const int64_t row0 = run / runs * c.chunk_rows, begin = run % runs * c.run_panels;
    const int64_t end = smaller(begin + c.run_panels, panels_);
    const int rows = static_cast<int>(smaller(c.chunk_rows, g.rows - row0));
    const ThreadScratch s = scratch(g);
    const PackedRows a = packed(g, row0, rows, s, source(g, begin, 1));
    const bool late = packs_late(c);

    int narrow = 0, listed = rows;  // wide rows at the end of the list
    for (int64_t r = row0; r < row0 + rows; ++r) {
      const bool wide =
          late ? Step::is_wide(p_.a, g.a, r, 1, g.contraction) : !a_in_place_ && wide_rows_[g.first_row + r];
      s.list[wide ? --listed : narrow++] = static_cast<int32_t>(r);
    }
    for (int64_t panel = begin, count; panel < end; panel += count) {
      const bool wide = panel_is_wide(g, panel);
#if defined(MXMOE_ISA_AVX512)
      if constexpr (Step::kSwaps) {
        if (swaps(c) && g.contraction && narrow == rows && !wide && (panel + 1) * kPanel <= p_.outputs) {
          const int64_t last = smaller(end, p_.outputs / kPanel);
          for (count = 1; panel + count < last && !panel_is_wide(g, panel + count);) ++count;
          for_pair_element(p_.b.element, [&]<Element E>() {
            if constexpr (is_scaled(E)) multiply_swapped<E>(g, rows, row0, panel, count, s);
          });
          continue;
        }
      }
#endif
      for (count = 1; count < smaller(c.block_panels, end - panel) && panel_is_wide(g, panel + count) == wide;) ++count;
      // After the run: what this thread is likely to take next.
      const int64_t next = panel + count < end ? panel + count : end + (p_.num_threads - 1) * c.run_panels;
      Ahead ahead = source(g, next, c.block_panels);
      const int in_steps = wide ? 0 : narrow;
      if (in_steps) multiply<Step>(g, &a, s.list, in_steps, panel, count, s, ahead);
      if (in_steps < rows) multiply<FloatStep>(g, nullptr, s.list + in_steps, rows - in_steps, panel, count, s, ahead);
    }
    if (stream_) stream_fence();
  }

  // The listed rows times some panels. a == nullptr: the rows are decoded to FP32 here.
  template <class S>
  void multiply(const GemmGroup& g, const PackedRows* a, const int32_t* list, int count, int64_t first,
                int64_t num_panels, const ThreadScratch& s, Ahead& ahead) const {
    const int64_t steps_total = ceil_div(g.contraction, S::kPerStep);
    const int tiles = static_cast<int>(ceil_div(count, kTileRows));
    int64_t done = 0;
    Ahead sums;  // what the next tile's products are added to
    do {
      const int64_t steps = smaller(g.config.block_steps, steps_total - done), k0 = done * S::kPerStep;
      const int64_t k = smaller(steps * S::kPerStep, g.contraction - k0);
      const bool last = done + steps == steps_total;
      for (int64_t q = 0; q < num_panels; ++q) {
        // Few rows leave no time to fetch the next panel while they are multiplied.
        Ahead own = source(g, first + q, 1), &fetched = g.rows <= HostGemmConfig::kFewRows ? ahead : own;
        own.next += 16 * p_.b.line_stride;
        S::panel(p_.b, g.b, (first + q) * kPanel, columns_of(first + q), k0, k, s.panels + q * steps * kPanel, fetched);
      }
      ahead.spread(tiles * num_panels * steps);
      for (int t = 0; t < tiles; ++t) {  // of equal heights, within one
        const int row0 = count * t / tiles, num_rows = count * (t + 1) / tiles - row0;
        const TileRows tile =
            a ? packed_tile(*a, list + row0, num_rows, done) : decoded_tile(g, list + row0, num_rows, k0, k, s.rows);
        Ahead& fetched = p_.accumulate ? sums : ahead;
        sums = results(g, list, row0 + num_rows, count * (t + 2) / tiles, num_panels);
        float* acc = s.acc + (last && done == 0 ? 0 : row0 * kPanel);  // stays in L1 where there is one block
        for (int64_t q = 0; q < num_panels; ++q) {
          const int64_t column0 = (first + q) * kPanel;
          const int columns = columns_of(first + q);
          const Sink sink = last ? sink_of(p_, g, columns) : Sink::kSums;
          TileOut out{{}, stream_};
          if (sink != Sink::kSums)
            for (int i = 0; i < num_rows; ++i)
              out.row[i] = g.out + (list[row0 + i] * p_.out_stride + column0) * out_size();
          multiply_tile<S>(sink, num_rows, tile, s.panels + q * steps * kPanel, steps, acc, done > 0, fetched, out);
          if (last && sink == Sink::kSums) finish_tile(p_, g, list + row0, num_rows, column0, columns, acc, stream_);
        }
      }
      done += steps;
    } while (done < steps_total);
  }

#if defined(MXMOE_ISA_AVX512)
  // All rows of a chunk, in panels, times whole panels of B, by items: a tile of B's lines over a piece of the
  // contraction. While one is multiplied the next is decoded.
  template <Element E>
  void multiply_swapped(const GemmGroup& g, int rows, int64_t row0, int64_t first, int64_t count,
                        const ThreadScratch& s) const {
    const int64_t steps_total = steps_of(g), panel_rows = vectors_of(rows) * kLanes,
                  panels = ceil_div(rows, panel_rows);
    const int64_t pieces = ceil_div(steps_total, kLineSteps), items = kLineTiles * pieces;  // of a panel of B
    struct Item {
      int64_t panel, line, num_lines, step;
      uint32_t* decoded;
    };
    const auto item_at = [&](int64_t i) -> Item {
      const int64_t tile = i % items / pieces, line = kPanel * tile / kLineTiles;
      return {first + i / items, line, kPanel * (tile + 1) / kLineTiles - line, i % pieces * kLineSteps,
              s.rows + i % 2 * kLineBuffer};
    };
    LineDecoder<E> decoder;
    const auto begin = [&](const Item& item) {
      const int64_t k0 = item.step * Step::kPerStep;
      decoder.begin(p_.b, g.b, item.panel * kPanel + item.line, static_cast<int>(item.num_lines), k0,
                    smaller(kLineSteps * Step::kPerStep, g.contraction - k0), item.decoded, kLineWords);
    };
    begin(item_at(0));
    decoder.finish();
    Ahead ahead;
    for (int64_t i = 0; i < count * items; ++i) {
      const Item item = item_at(i);
      if (i % items == 0) {
        ahead = source(g, item.panel + 1, 1);
        ahead.spread(kLineTiles * panels * steps_total);
      }
      if (i + 1 < count * items) begin(item_at(i + 1));
      const int64_t steps = smaller(kLineSteps, steps_total - item.step);
      const int64_t pace = larger(steps * panels / larger(decoder.left(), 1), 1);
      for (int64_t q = 0; q < panels; ++q) {
        const int64_t vectors = ceil_div(smaller(panel_rows, rows - q * panel_rows), kLanes);
        multiply_lines(static_cast<int>(item.num_lines), static_cast<int>(vectors), item.decoded,
                       s.a + (q * steps_total + item.step) * kPanel, steps, s.acc + (q * kPanel + item.line) * kPanel,
                       item.step > 0, ahead, decoder, pace);
      }
      decoder.finish();
      if ((i + 1) % items == 0) finish_panel(g, row0, rows, panel_rows, item.panel, s.acc);
    }
  }

  // acc: (panels of A, 64 columns, 64 rows).
  void finish_panel(const GemmGroup& g, int64_t row0, int64_t rows, int64_t panel_rows, int64_t panel,
                    const float* acc) const {
    with_dtype(p_.out_dtype, [&]<DType D>() {
      for (int64_t r = 0; r < rows; r += panel_rows, acc += kPanel * kPanel)
        finish_turned<D>(p_, g, row0 + r, static_cast<int>(smaller(panel_rows, rows - r)), panel * kPanel, acc,
                         stream_);
    });
  }
#endif

  static TileRows packed_tile(const PackedRows& a, const int32_t* list, int num_rows, int64_t step) {
    TileRows tile;
    tile.step_stride = a.panel_stride ? kPanel * 4 : 4;
    for (int i = 0; i < num_rows; ++i) tile.row[i] = a.row(list[i], step);
    return tile;
  }

  TileRows decoded_tile(const GemmGroup& g, const int32_t* list, int num_rows, int64_t k0, int64_t k,
                        uint32_t* rows) const {
    TileRows tile;
    tile.step_stride = 4;
    for (int i = 0; i < num_rows; ++i) {
      uint32_t* row = rows + i * g.config.block_steps;
      FloatStep::rows(p_.a, g.a, list[i], 1, k0, k, row, 0);
      tile.row[i] = reinterpret_cast<const uint8_t*>(row);
    }
    return tile;
  }

  static constexpr int64_t kTasksPerThread = 8, kLastTasks = 6, kLatePanels = 4;

  const GemmProblem& p_;
  const int64_t panels_;
  int64_t num_rows_ = 0, packed_bytes_ = 0, num_packs_ = 0, num_tasks_ = 0;
  bool a_in_place_ = true, stream_ = false;
  uint8_t *packed_ = nullptr, *wide_rows_ = nullptr;
};

}  // namespace

void grouped_gemm(const GemmProblem& problem) {
#if defined(MXMOE_ISA_AVX512)
  if (!problem.a.in_fp32 && !problem.b.in_fp32) return Gemm<PairStep>(problem).run();
#endif
  Gemm<FloatStep>(problem).run();
}

}  // namespace mxmoe::host::MXMOE_ISA
