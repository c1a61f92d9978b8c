// Groups of few rows, where reading B takes longer than multiplying with it: B is read once, in the order of its
// addresses, and its lines go through registers only (turned, decoded, multiplied), where grouped_gemm writes a panel
// first. Each thread has a share of all panels and fetches what it will read next; who is done takes from the others.
// The same sums as grouped_gemm's, in the same order: the same bits.
#include <atomic>

#include "host/gemm/few_floats.h"
#include "host/gemm/few_pairs.h"
#include "host/grouped_mm.h"
#include "host/threads.h"

namespace mxmoe::host::MXMOE_ISA {
namespace {

constexpr int kMaxThreads = 64, kFewRows = static_cast<int>(HostGemmConfig::kFewRows);
constexpr int kRowsAtOnce = 4;        // of A: their sums stay in registers
constexpr int64_t kFloatBlock = 512;  // contraction of a panel on the FP32 path

#if defined(MXMOE_ISA_AVX512)
template <Element E>
using FewKernel = FewPairs<E>;
#else
template <Element E>
using FewKernel = FewFloats<E>;
#endif

// Listed rows of a group times a panel of B on the FP32 path.
static void multiply_floats(const GemmProblem& p, const GemmGroup& g, const int32_t* list, int count, int64_t column0,
                            int columns, float* sums) {
  auto* panel = static_cast<uint32_t*>(workspace(WorkspaceSlot::kThread, (kPanel + kTileRows) * kFloatBlock * 4));
  uint32_t* words = panel + kPanel * kFloatBlock;
  Ahead none;
  for (int done = 0; done < count; done += kTileRows) {
    const int num_rows = static_cast<int>(smaller(kTileRows, count - done));
    TileRows tile;
    tile.step_stride = 4;
    for (int r = 0; r < num_rows; ++r) tile.row[r] = reinterpret_cast<const uint8_t*>(words + r * kFloatBlock);
    for (int64_t k0 = 0; k0 == 0 || k0 < g.contraction; k0 += kFloatBlock) {
      const int64_t k = smaller(kFloatBlock, g.contraction - k0);
      FloatStep::panel(p.b, g.b, column0, columns, k0, k, panel, none);
      for (int r = 0; r < num_rows; ++r)
        FloatStep::rows(p.a, g.a, list[done + r], 1, k0, k, words + r * kFloatBlock, 0);
      multiply_tile<FloatStep>(Sink::kSums, num_rows, tile, panel, k, sums, k0 > 0, none, {});
    }
    finish_tile(p, g, list + done, num_rows, column0, columns, sums, false);
  }
}

// A group's rows as steps read them, and which of them need FP32.
struct RowsOfGroup {
  const uint32_t* row[kFewRows];
  int32_t narrow[kFewRows], wide[kFewRows];
  int num_narrow = 0, num_wide = 0;
};

template <Element E>
class FewRows {
  using Kernel = FewKernel<E>;
  using Step = typename Kernel::Step;

 public:
  explicit FewRows(const GemmProblem& problem) : p_(problem), panels_((problem.outputs + kPanel - 1) / kPanel) {}

  void run() {
    pack_rows();
    const int64_t total = p_.num_groups * panels_;
    const int threads = static_cast<int>(smaller(p_.num_threads < kMaxThreads ? p_.num_threads : kMaxThreads, total));
    for (int t = 0; t < threads; ++t) shares_[t].next = total * t / threads, shares_[t].end = total * (t + 1) / threads;
    parallel(threads, threads, [&](int64_t own, int) {
      for (int64_t i = 0; i < threads; ++i) drain(shares_[(own + i) % threads]);
    });
  }

 private:
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };

  void drain(Share& share) {
    for (int64_t task; (task = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;)
      multiply_panel(task, share.end);
  }

  void pack_rows() {
    int64_t bytes = p_.num_groups * static_cast<int64_t>(sizeof(RowsOfGroup));
    for (int64_t e = 0; e < p_.num_groups; ++e) bytes += p_.groups[e].rows * words(p_.groups[e]) * 4;
    auto* base = static_cast<uint8_t*>(workspace(WorkspaceSlot::kA, bytes));
    rows_ = reinterpret_cast<RowsOfGroup*>(base + bytes - p_.num_groups * static_cast<int64_t>(sizeof(RowsOfGroup)));
    auto* packed = reinterpret_cast<uint32_t*>(base);
    for (int64_t e = 0; e < p_.num_groups; ++e) {
      const GemmGroup& g = p_.groups[e];
      RowsOfGroup& rows = *new (rows_ + e) RowsOfGroup;
      Step::rows(p_.a, g.a, 0, static_cast<int>(g.rows), 0, g.contraction, packed, words(g));
      for (int32_t r = 0; r < g.rows; ++r, packed += words(g)) {
        rows.row[r] = packed;
        if (Step::is_wide(p_.a, g.a, r, 1, g.contraction))
          rows.wide[rows.num_wide++] = r;
        else
          rows.narrow[rows.num_narrow++] = r;
      }
    }
  }
  static int64_t words(const GemmGroup& g) { return (g.contraction + 31) / 32 * (32 / Step::kPerStep); }

  int columns_of(int64_t panel) const { return static_cast<int>(smaller(kPanel, p_.outputs - panel * kPanel)); }

  // The memory of some lines of a task's panel: values and scales, where they are one piece.
  Fetch source(int64_t task, int64_t line, int64_t num_lines) const {
    const GemmGroup& g = p_.groups[task / panels_];
    const int64_t line0 = task % panels_ * kPanel + line;
    num_lines = smaller(num_lines, p_.outputs - line0);
    const auto piece = [&](const uint8_t* first, int64_t stride, int64_t bytes) -> Ahead {
      if (stride > bytes || num_lines <= 0) return {};
      return {first + line0 * stride, first + (line0 + num_lines) * stride};
    };
    const int64_t bytes = is_packed(E) ? (g.contraction + 1) / 2 : g.contraction * p_.b.k_stride;
    Fetch from{piece(g.b.values, p_.b.line_stride, bytes), {}};
    if constexpr (is_scaled(E))
      from.scales = piece(g.b.scales, p_.b.scale_stride, (g.contraction + block_of(E) - 1) / block_of(E));
    return from;
  }

  // What is read soon: the values of the next tile, and its part of the next panel's scales, all read at its start.
  Fetch next(int64_t task, int64_t end, int64_t line, int64_t tile) const {
    Fetch ahead{};
    if (task + 1 < end) ahead = source(task + 1, line, tile);
    const bool last = line + tile >= columns_of(task % panels_);
    if (!last)
      ahead.values = source(task, line + tile, tile).values;
    else if (task + 1 < end)
      ahead.values = source(task + 1, 0, tile).values;
    return ahead;
  }

  void multiply_panel(int64_t task, int64_t end) const {
    const GemmGroup& g = p_.groups[task / panels_];
    const RowsOfGroup& rows = rows_[task / panels_];
    const int64_t column0 = task % panels_ * kPanel;
    const int columns = columns_of(task % panels_);
    alignas(64) float sums[kFewRows * kPanel];
    const auto is_wide = [&] { return Step::is_wide(p_.b, g.b, column0, columns, g.contraction); };
    bool wide = !p_.b.panels && is_wide();  // panels are read once: scales are seen on the way
    for (int done = 0; !wide && done < rows.num_narrow; done += kRowsAtOnce) {
      const int count = static_cast<int>(smaller(kRowsAtOnce, rows.num_narrow - done));
      const bool exact = with_count(count, [&]<int R>() { return multiply_rows<R>(task, end, done, sums); });
      wide = !exact && is_wide();
      if (!wide) finish_tile(p_, g, rows.narrow + done, count, column0, columns, sums, false);
    }
    if constexpr (Step::kPerStep == 2) {
      if (wide) multiply_floats(p_, g, rows.narrow, rows.num_narrow, column0, columns, sums);
      if (rows.num_wide) multiply_floats(p_, g, rows.wide, rows.num_wide, column0, columns, sums);
    }
  }

  template <typename Body>
  static bool with_count(int count, Body&& body) {
    switch (count) {
      case 1:
        return body.template operator()<1>();
      case 2:
        return body.template operator()<2>();
      case 3:
        return body.template operator()<3>();
      default:
        return body.template operator()<kRowsAtOnce>();
    }
  }

  // R rows from narrow one `done` on times the panel.
  template <int R>
  bool multiply_rows(int64_t task, int64_t end, int done, float* sums) const {
    const GemmGroup& g = p_.groups[task / panels_];
    const RowsOfGroup& rows = rows_[task / panels_];
    const uint32_t* row[R];
    for (int r = 0; r < R; ++r) row[r] = rows.row[rows.narrow[done + r]];
    const int columns = columns_of(task % panels_), tile = Kernel::tile(p_.b, R);
    const int64_t column0 = task % panels_ * kPanel;
    bool exact = true;
    for (int line = 0; line < columns; line += tile) {
      Fetch ahead = done == 0 ? next(task, end, line, tile) : Fetch{};
      exact &= Kernel::template multiply<R>(p_.b, g.b, column0 + line, columns - line, g.contraction, row, sums + line,
                                            ahead);
    }
    return exact;
  }

  const GemmProblem& p_;
  const int64_t panels_;
  RowsOfGroup* rows_ = nullptr;
  Share shares_[kMaxThreads];
};

}  // namespace

bool few_rows_gemm(const GemmProblem& problem) {
  const auto readable = [](const LineFormat& f) {  // neighbours along the contraction, exact in BF16
    if (f.in_fp32 || f.line_major) return false;
    return is_packed(f.element) || f.k_stride == (f.element == Element::kBF16 ? 2 : 1);
  };
  if (!readable(problem.a) || !readable(problem.b) || problem.accumulate) return false;
  for (int64_t e = 0; e < problem.num_groups; ++e)
    if (problem.groups[e].rows > kFewRows) return false;
  for_pair_element(problem.b.element, [&]<Element E>() { FewRows<E>(problem).run(); });
  return true;
}

}  // namespace mxmoe::host::MXMOE_ISA
