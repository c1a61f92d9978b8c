// sm_90a's tensor core: asynchronous until waited for, operands read from shared memory through the async proxy. Every
// warp of the warpgroup makes its own 16 rows.
#include "interpreter/decode.h"
#include "interpreter/machine.h"

namespace mxmoe::interpreter {
namespace {

float half_value(const std::byte* p, bool bf16) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return bf16 ? __builtin_bit_cast(float, static_cast<uint32_t>(h) << 16)
              : static_cast<float>(__builtin_bit_cast(_Float16, h));
}

}  // namespace

void Warp::wgmma_fence(Where where) {
  if (begin("wgmma.fence", where).is("skip")) return;
  wgmma_fenced_ = true;
}

void Warp::wgmma_commit_group(Where where) {
  if (begin("wgmma.commit_group", where).is("skip")) return;
  for (WgmmaOp& op : wgmmas_)
    if (op.group < 0) op.group = wgmma_groups_;
  ++wgmma_groups_;
}

void Warp::wait_for_wgmma(registers<float, 64>& d, int pending, Where where) {
  const Op op = begin("wgmma.wait_group", where);
  if (op.is("skip")) return;
  if (op.is("one more")) ++pending;
  while (!wgmmas_.empty() && wgmmas_.front().group >= 0 && wgmmas_.front().group < wgmma_groups_ - pending) {
    wgmmas_.front().run();
    w.tensor_done = wgmmas_.front().step;
    wgmmas_.erase(wgmmas_.begin());
  }
  w.generic.raise(w.tensor_component, w.tensor_done);
  if (wgmmas_.empty()) d.pending = nullptr;
  wgmma_fenced_ = false;  // the kernel may touch the registers now
}

void Warp::wgmma(registers<float, 64>& d, uint64_t a, uint64_t b, bool bf16, bool a_mn, bool b_mn, bool accumulate,
                 Where where) {
  constexpr int kColumns = 128, kElements = 16, kRows = 16;
  const Op op = begin("wgmma.mma_async", where);
  if (op.is("skip")) return;
  if (op.is("accumulate")) accumulate = !accumulate;
  if (op.is("a.start")) a += 2;
  if (op.is("b.start")) b += 2;
  if (op.is("a.stride")) a += uint64_t{8} << SharedDescriptor::kStride.first;
  if (op.is("b.stride")) b += uint64_t{8} << SharedDescriptor::kStride.first;
  if (op.is("b.leading")) b += uint64_t{8} << SharedDescriptor::kLeading.first;
  if (op.is("a.swizzle")) a ^= uint64_t{3} << 62;
  if (op.is("b.swizzle")) b ^= uint64_t{3} << 62;
  const auto from_a = SharedDescriptor::of_wgmma(a), from_b = SharedDescriptor::of_wgmma(b);
  if (!from_a.valid || !from_b.valid) grid.fail(w, op, "descriptor", "not a valid shared-memory descriptor");
  if ((a_mn && from_a.line_bytes != 128) || (b_mn && from_b.line_bytes != 128))
    grid.fail(w, op, "descriptor", "MN-major operands are taken with a swizzle of 128 bytes");
  if (b_mn) grid.mark(op, "b.leading");  // the 64 rows of A are one line
  if (!wgmma_fenced_) grid.fail(w, op, "race", "no wgmma.fence between uses of the registers and this");
  d.pending = this;
  const uint32_t step = ++w.tensor_step;
  const auto run = [=, this, &d, issued = Issued(w)] {
    const uint32_t record = grid.record(w, op, Proxy::kAsync, false, w.tensor_component, step);
    const auto gather = [&](const SharedDescriptor& o, bool mn_major, int first, int lines) {
      std::vector<float> values(static_cast<size_t>(lines * kElements));
      for (int line = 0; line < lines; ++line)
        for (int k = 0; k < kElements; ++k) {
          const auto across = static_cast<uint32_t>(first + line), along = static_cast<uint32_t>(k);
          const uint32_t at = mn_major ? o.mn_major(2 * across, along) : o.k_major(across, 2 * along);
          grid.touch_shared(w, op, record, issued.view(), at, 2);
          values[static_cast<size_t>(line * kElements + k)] = half_value(w.cta->shared + at, bf16);
        }
      return values;
    };
    const auto va = gather(from_a, a_mn, w.idx % 4 * kRows, kRows), vb = gather(from_b, b_mn, 0, kColumns);
    for (int i = 0; i < kColumns / 2; ++i)
      for (int lane = 0; lane < kLanes; ++lane) {
        const int row = lane / 4 + (i & 2 ? 8 : 0), column = i / 4 * 8 + lane % 4 * 2 + (i & 1);
        float sum = accumulate ? d.value[i][lane] : 0.0f;
        for (int k = 0; k < kElements; ++k)
          sum += va[static_cast<size_t>(row * kElements + k)] * vb[static_cast<size_t>(column * kElements + k)];
        d.value[i][lane] = sum;
      }
  };
  wgmmas_.push_back({run, step, -1});
}

}  // namespace mxmoe::interpreter
