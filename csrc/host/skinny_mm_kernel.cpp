// Groups of few rows, where reading B takes longer than multiplying with it: B is read once, in the order of its
// addresses, and its lines go through registers only (turned, decoded, multiplied), where grouped_gemm writes a panel
// first. Each thread has a share of all panels and fetches what it will read next; who is done takes from the others.
// The same sums as grouped_gemm's, in the same order: the same bits.
#include "host/grouped_mm.h"
#if defined(MXMOE_ISA_AVX512)
#include <atomic>

#include "host/gemm/tile.h"
#include "host/threads.h"
#endif

namespace mxmoe::host::MXMOE_ISA {
#if defined(MXMOE_ISA_AVX512)
namespace {

constexpr int kMaxThreads = 64, kFewRows = static_cast<int>(HostGemmConfig::kFewRows);
constexpr int kRowsAtOnce = 4;        // of A, times the groups of 16 lines of a tile: sums in registers
constexpr int64_t kFloatBlock = 512;  // contraction of a panel on the FP32 path

MXMOE_INLINE int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Groups of 16 lines that take turns, so that few sums are not always waiting for themselves. BF16 leaves time for it.
template <Element E, int R>
constexpr int kTileGroups = E == Element::kBF16 || (R > 2 && !is_packed(E)) ? 1 : 2;

// Blocks of 32 elements of B's lines, decoded and given to multiply(step, vectors of the groups), steps ascending.
template <Element E, int kGroups>
struct Turner : TurnedLines<E, kGroups> {
  template <bool kWhole, class F>
  __attribute__((always_inline)) void block(const LineFormat& f, const uint8_t* first, int num_lines, int count,
                                            int block, F&& multiply) const {
    using Turned = TurnedLines<E, kGroups>;
    constexpr int kParts = Turned::kParts, kSteps = Turned::kSteps, kBlocks = static_cast<int>(kSpan<E> / 32);
    __m512i parts[kGroups][kParts];
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g)
      Turned::template load<kWhole>(first + 16 * g * f.line_stride, f.line_stride, num_lines - 16 * g, count, parts[g]);
#pragma GCC unroll 8
    for (int j = 0; j < kParts; ++j) {
      __m512i steps[kGroups][kSteps];
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) this->decode(parts[g][j], this->scales_of(g * kBlocks + block, j), steps[g]);
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
        __m512i b[kGroups];
        for (int g = 0; g < kGroups; ++g) b[g] = steps[g][s];
        multiply(j * kSteps + s, b);
      }
    }
  }
};

template <int kGroups>
struct Turner<Element::kBF16, kGroups> {
  static_assert(kGroups == 1);
  template <bool kWhole, class F>
  __attribute__((always_inline)) void block(const LineFormat& f, const uint8_t* first, int num_lines, int count, int,
                                            F&& multiply) const {
    const __mmask32 valid = first_bytes<__mmask32>(count);
    __m512i steps[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const uint8_t* line = first + i * f.line_stride;
      steps[i] = kWhole ? _mm512_loadu_si512(line) : _mm512_maskz_loadu_epi16(i < num_lines ? valid : 0, line);
    }
    transpose16(steps);
#pragma GCC unroll 16
    for (int s = 0; s < 16; ++s) multiply(s, steps + s);
  }
};

struct Fetch {
  Ahead values, scales;
};

// R rows of A times a tile of B's lines: 16 outputs of each group at sums + 16 g, rows kPanel apart.
template <Element E, int R>
__attribute__((noinline)) void multiply_lines(const LineFormat& f, const Lines& lines, int64_t line0, int num_lines,
                                              int64_t contraction, const uint32_t* const* rows, float* sums,
                                              Fetch& ahead) {
  constexpr int kGroups = kTileGroups<E, R>;
  constexpr int kFetch = kGroups * (is_packed(E) ? 4 : E == Element::kBF16 ? 16 : 8);  // cache lines of 32 elements
  // Measured on Zen 5: of the read bandwidth, BF16 0.77 in bursts, 0.85 line by line between the products; MXFP8 0.78,
  // 0.73; NVFP4 0.63, 0.57.
  constexpr bool kBurst = E != Element::kBF16;
  const uint8_t* values = lines.values + line0 * f.line_stride;
  const uint8_t* scales = lines.scales + line0 * f.scale_stride;
  Turner<E, kGroups> turner;
  __m512 sum[R][kGroups];
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < kGroups; ++g) sum[r][g] = _mm512_setzero_ps();

  const auto block = [&]<bool kWhole>(int64_t k, int count) __attribute__((always_inline)) {
    int index = 0;
    if constexpr (is_scaled(E)) {
      index = static_cast<int>(k % kSpan<E> / 32);
      if (index == 0) {
        ahead.scales.fetch(4 * kGroups);
        for (int g = 0; g < kGroups; ++g)
          turn_scales(turner, g, scales + 16 * g * f.scale_stride + k / block_of(E), f.scale_stride, num_lines - 16 * g,
                      contraction - k);
      }
    }
    if (kBurst) ahead.values.fetch(kFetch);
    const bool fetch = !kBurst && ahead.values.next < ahead.values.end;
    const uint8_t* const line = fetch ? ahead.values.next : values;
    const int64_t line_bytes = fetch ? 64 : 0;
    if (fetch) ahead.values.next += 64 * kFetch;
    const uint32_t* words[R];
    for (int r = 0; r < R; ++r) words[r] = rows[r] + k / 2;
    const auto multiply = [&](int s, const __m512i* b) __attribute__((always_inline)) {
      if (!kWhole && 2 * s >= count) return;
      if (!kBurst) __builtin_prefetch(line + s * line_bytes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512i a = _mm512_set1_epi32(static_cast<int>(words[r][s]));
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) sum[r][g] = _mm512_dpbf16_ps(sum[r][g], (__m512bh)a, (__m512bh)b[g]);
      }
    };
    turner.template block<kWhole>(f, at<E>(values, f.k_stride, k), num_lines, count, index, multiply);
  };
  const int64_t whole = num_lines >= 16 * kGroups ? contraction / 32 * 32 : 0;
  for (int64_t k = 0; k < whole; k += 32) block.template operator()<true>(k, 32);
  for (int64_t k = whole; k < contraction; k += 32)
    block.template operator()<false>(k, static_cast<int>(smaller(32, contraction - k)));
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < kGroups; ++g) _mm512_storeu_ps(sums + r * kPanel + 16 * g, sum[r][g]);
}

template <Element E>
void multiply_lines(int num_rows, const LineFormat& f, const Lines& lines, int64_t line0, int num_lines,
                    int64_t contraction, const uint32_t* const* rows, float* sums, Fetch& ahead) {
  switch (num_rows) {
    case 1:
      return multiply_lines<E, 1>(f, lines, line0, num_lines, contraction, rows, sums, ahead);
    case 2:
      return multiply_lines<E, 2>(f, lines, line0, num_lines, contraction, rows, sums, ahead);
    case 3:
      return multiply_lines<E, 3>(f, lines, line0, num_lines, contraction, rows, sums, ahead);
    default:
      return multiply_lines<E, 4>(f, lines, line0, num_lines, contraction, rows, sums, ahead);
  }
}

// Listed rows of a group times a panel of B on the FP32 path.
void multiply_floats(const GemmProblem& p, const GemmGroup& g, const int32_t* list, int count, int64_t column0,
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

// A group's rows as BF16 pairs, and which of them need FP32.
struct PairRows {
  const uint32_t* row[kFewRows];
  int32_t narrow[kFewRows], wide[kFewRows];
  int num_narrow = 0, num_wide = 0;
};

template <Element E>
class FewRows {
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
    int64_t bytes = p_.num_groups * static_cast<int64_t>(sizeof(PairRows));
    for (int64_t e = 0; e < p_.num_groups; ++e) bytes += p_.groups[e].rows * words(p_.groups[e]) * 4;
    auto* base = static_cast<uint8_t*>(workspace(WorkspaceSlot::kA, bytes));
    rows_ = reinterpret_cast<PairRows*>(base + bytes - p_.num_groups * static_cast<int64_t>(sizeof(PairRows)));
    auto* packed = reinterpret_cast<uint32_t*>(base);
    for (int64_t e = 0; e < p_.num_groups; ++e) {
      const GemmGroup& g = p_.groups[e];
      PairRows& rows = *new (rows_ + e) PairRows;
      PairStep::rows(p_.a, g.a, 0, static_cast<int>(g.rows), 0, g.contraction, packed, words(g));
      for (int32_t r = 0; r < g.rows; ++r, packed += words(g)) {
        rows.row[r] = packed;
        if (PairStep::is_wide(p_.a, g.a, r, 1, g.contraction))
          rows.wide[rows.num_wide++] = r;
        else
          rows.narrow[rows.num_narrow++] = r;
      }
    }
  }
  static int64_t words(const GemmGroup& g) { return (g.contraction + 31) / 32 * 16; }

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
    const PairRows& rows = rows_[task / panels_];
    const int64_t column0 = task % panels_ * kPanel;
    const int columns = columns_of(task % panels_);
    alignas(64) float sums[kFewRows * kPanel];
    if (is_wide<E>(p_.b, g.b, column0, columns, g.contraction)) {
      multiply_floats(p_, g, rows.narrow, rows.num_narrow, column0, columns, sums);
    } else {
      for (int done = 0; done < rows.num_narrow; done += kRowsAtOnce) {
        const int count = static_cast<int>(smaller(kRowsAtOnce, rows.num_narrow - done));
        const uint32_t* row[kRowsAtOnce];
        for (int r = 0; r < count; ++r) row[r] = rows.row[rows.narrow[done + r]];
        const int tile = 16 * (count == 1 ? kTileGroups<E, 1> : count == 2 ? kTileGroups<E, 2> : kTileGroups<E, 4>);
        for (int line = 0; line < columns; line += tile) {
          Fetch ahead = done == 0 ? next(task, end, line, tile) : Fetch{};
          multiply_lines<E>(count, p_.b, g.b, column0 + line, columns - line, g.contraction, row, sums + line, ahead);
        }
        finish_tile(p_, g, rows.narrow + done, count, column0, columns, sums, false);
      }
    }
    if (rows.num_wide) multiply_floats(p_, g, rows.wide, rows.num_wide, column0, columns, sums);
  }

  const GemmProblem& p_;
  const int64_t panels_;
  PairRows* rows_ = nullptr;
  Share shares_[kMaxThreads];
};

}  // namespace
#endif

bool skinny_gemm([[maybe_unused]] const GemmProblem& problem) {
#if defined(MXMOE_ISA_AVX512)
  const auto in_pairs = [](const LineFormat& f) {  // of elements that are neighbours along the contraction
    if (f.in_fp32 || f.line_major) return false;
    return is_packed(f.element) || f.k_stride == (f.element == Element::kBF16 ? 2 : 1);
  };
  if (!in_pairs(problem.a) || !in_pairs(problem.b) || problem.accumulate) return false;
  for (int64_t e = 0; e < problem.num_groups; ++e)
    if (problem.groups[e].rows > kFewRows) return false;
  PairStep::for_pair_element(problem.b.element, [&]<Element E>() { FewRows<E>(problem).run(); });
  return true;
#else
  return false;
#endif
}

}  // namespace mxmoe::host::MXMOE_ISA
