// The tensor core and its memory: tcgen05 instructions decoded from raw descriptor bits, run in order by a queue of the
// CTA.
#include <array>
#include <cmath>

#include "formats.h"
#include "interpreter/decode.h"
#include "interpreter/machine.h"

namespace mxmoe::interpreter {
namespace {

using cuda::MmaKind;

template <typename E>
std::array<float, 256> element_values() {
  std::array<float, 256> values{};
  for (uint32_t i = 0; i < 256; ++i) {
    const uint32_t sign = i >> (E::kBits - 1) & 1, code = i & ((1u << (E::kBits - 1)) - 1);
    values[i] = __builtin_bit_cast(float, decode_magnitude<E>(code) | sign << 31);
  }
  return values;
}

float e4m3_value(uint32_t code) {
  static const auto values = element_values<E4M3>();
  return values[code];
}

float decode_element(MmaKind kind, uint32_t format, const std::byte* p, bool high_nibble) {
  static const auto e5m2 = element_values<E5M2>(), e2m1 = element_values<E2M1>();
  const auto byte = static_cast<uint32_t>(*p);
  if (kind == MmaKind::kF16) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    if (format == 1) return __builtin_bit_cast(float, static_cast<uint32_t>(h) << 16);
    return static_cast<float>(__builtin_bit_cast(_Float16, h));
  }
  if (kind == MmaKind::kMxf4nvf4) return e2m1[high_nibble ? byte >> 4 : byte & 15];
  return format == 1 ? e5m2[byte] : e4m3_value(byte);
}

float scale_value(bool e8m0, uint32_t byte) {
  return e8m0 ? __builtin_bit_cast(float, e8m0_bits(byte)) : e4m3_value(byte);
}

constexpr int kLineBytes = 32;  // one step of the contraction: 32 bytes of each line

// The operand's lines as FP32, [line][element].
std::vector<float> gather(const Cta& cta, MmaKind kind, uint32_t format, const SharedDescriptor& d, bool mn_major,
                          int lines) {
  const int elements = kind == MmaKind::kF16 ? 16 : kind == MmaKind::kMxf4nvf4 ? 64 : 32;
  std::vector<float> values(static_cast<size_t>(lines * elements));
  for (int line = 0; line < lines; ++line)
    for (int i = 0; i < elements; ++i) {
      const auto along = static_cast<uint32_t>(i * kLineBytes / elements),
                 across = static_cast<uint32_t>(line * kLineBytes / elements);
      const uint32_t at =
          mn_major ? d.mn_major(across, static_cast<uint32_t>(i)) : d.k_major(static_cast<uint32_t>(line), along);
      values[static_cast<size_t>(line * elements + i)] = decode_element(kind, format, cta.shared + at, i % 2);
    }
  return values;
}

}  // namespace

// --- tensor memory

void Warp::alloc(int ctas, uint32_t shared, uint32_t columns, Where where) {
  const Op op = begin("tcgen05.alloc", where);
  if (op.is("skip")) return;
  Cta& cta = *w.cta;
  if (columns < 32 || columns > kTmemColumns || (columns & (columns - 1)))
    grid.fail(w, op, "tensor memory", "columns must be a power of two from 32 to 512");
  uint32_t first = 0;
  for (auto [column, count] : cta.tmem_allocations) first = column + count;
  if (first + columns > kTmemColumns)
    grid.fail(w, op, "tensor memory", "no columns are left: this would block for ever");
  if (cta.tmem.empty()) {
    cta.tmem.assign(kTmemLanes * kTmemColumns, 0x7fc0dead);
    cta.tmem_shadow = Shadow(kTmemLanes * kTmemColumns);
  }
  cta.tmem_allocations[first] = columns;
  cta.tmem_ctas = ctas;
  w.tensor_done = ++w.tensor_step;
  cta.tmem_owner = grid.record(w, op, Proxy::kTensor, true, w.tensor_component, w.tensor_step);
  grid.touch_shared(w, op, grid.record(w, op, Proxy::kGeneric, true, w.component, w.step), w.view(), shared, 4);
  std::memcpy(cta.shared + shared, &first, 4);
}

void Warp::dealloc(int ctas, uint32_t tmem, uint32_t columns, Where where) {
  const Op op = begin("tcgen05.dealloc", where);
  if (op.is("skip")) return;
  const auto found = w.cta->tmem_allocations.find(tmem & 0xffff);
  if (found == w.cta->tmem_allocations.end() || found->second != columns || w.cta->tmem_ctas != ctas)
    grid.fail(w, op, "tensor memory", "these columns were not allocated");
  // Freeing is a write: nothing may use the columns any more.
  const uint32_t record = grid.record(w, op, Proxy::kTensor, true, w.tensor_component, ++w.tensor_step);
  grid.touch_tmem(w, op, record, w.view(), 0, kTmemLanes, static_cast<int>(tmem & 0xffff), static_cast<int>(columns));
  w.cta->tmem_allocations.erase(found);
  w.tensor_done = w.tensor_step;
}

// The values are read, and the registers written, at some time until they are waited for.
void Warp::tcgen05_ld(registers<uint32_t, 16>& d, uint32_t tmem, Where where) {
  const Op op = begin("tcgen05.ld", where);
  if (op.is("skip")) return;
  if (op.is("column")) tmem += 1;
  const int lane = static_cast<int>(tmem >> 16), column = static_cast<int>(tmem & 0xffff);
  if (lane != w.idx % 4 * 32)
    grid.fail(w, op, "tensor memory",
              "warp " + std::to_string(w.idx) + " may read lanes " + std::to_string(w.idx % 4 * 32) + " and on, not " +
                  std::to_string(lane));
  const uint32_t record = grid.record(w, op, Proxy::kTensor, false, w.tensor_component, ++w.tensor_step);
  grid.touch_tmem(w, op, record, w.view(), lane, kLanes, column, 16);
  d.pending = this;
  loading_ = tmem;
}

void Warp::tcgen05_wait_ld(registers<uint32_t, 16>& d, Where where) {
  const Op op = begin("tcgen05.wait::ld", where);
  if (op.is("skip")) return;
  w.tensor_done = w.tensor_step;
  if (d.pending) {
    for (uint32_t j = 0; j < 16; ++j)
      for (uint32_t i = 0; i < kLanes; ++i)
        d.value[j][i] = w.cta->tmem[((loading_ >> 16) + i) * kTmemColumns + (loading_ & 0xffff) + j];
    d.pending = nullptr;
  }
}

void Warp::read_before_wait() const {
  throw KernelError("race", std::string(w.role) + " (warp " + std::to_string(w.idx) + "), CTA " +
                                std::to_string(w.cta->idx) +
                                ": registers are used before tcgen05.wait::ld or wgmma.wait_group");
}

void Warp::tcgen05_fence_before_thread_sync(Where where) {
  if (begin("tcgen05.fence::before_thread_sync", where).is("skip")) return;
  w.generic.raise(w.tensor_component, w.tensor_done);
}

void Warp::tcgen05_fence_after_thread_sync(Where where) {
  if (begin("tcgen05.fence::after_thread_sync", where).is("skip")) return;
  w.tensor.join(w.generic);
}

// --- the queue of the tensor core

// Whose memories an instruction works on: the warp's CTA, or with it, which is the first, the other one of its pair.
std::vector<Cta*> Warp::tensor_ctas(const Op& op, int ctas) {
  if (ctas == 1) return {w.cta};
  const auto& pair = w.cta->cluster->ctas;
  if (pair.size() != 2 || w.cta->cluster_rank) grid.fail(w, op, "tensor memory", "the first CTA of a pair issues this");
  return pair;
}

void Warp::copy_scales(int ctas, uint32_t tmem, uint64_t descriptor, pred p, Where where) {
  const Op op = begin("tcgen05.cp", where);
  p = one_lane(op, p);
  if (op.is("column")) ++tmem;
  if (op.is("stride")) descriptor += uint64_t{1} << SharedDescriptor::kStride.first;
  if (op.is("start")) descriptor += 1;
  const SharedDescriptor from(descriptor);
  if (!from.valid || from.line_bytes != 16)
    grid.fail(w, op, "descriptor", "not a valid unswizzled shared-memory descriptor");
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    const uint32_t step = ++w.cta->tensor_step;
    w.cta->tensor_queue.push_back([=, this, group = tensor_ctas(op, ctas), issued = Issued(w)] {
      const uint32_t reads = grid.record(w, op, Proxy::kAsync, false, w.cta->tensor_component, step);
      const uint32_t writes = grid.record(w, op, Proxy::kTensor, true, w.cta->tensor_component, step);
      const auto column = static_cast<int>(tmem & 0xffff);
      for (Cta* in : group) {
        grid.touch_tmem_of(*in, w, op, writes, issued.view(), 0, kTmemLanes, column, 4);
        for (uint32_t line = 0; line < 32; ++line) {
          const uint32_t at = from.k_major(line, 0);
          grid.touch_shared_of(*in, w, op, reads, issued.view(), at, 16);
          for (uint32_t copy = 0; copy < 4; ++copy)
            std::memcpy(&in->tmem[(copy * 32 + line) * kTmemColumns + static_cast<uint32_t>(column)], in->shared + at,
                        16);
        }
      }
    });
  }
}

void Warp::mma(MmaKind kind, int ctas, uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate,
               uint32_t scale_a, uint32_t scale_b, pred p, Where where) {
  const bool scaled = kind != MmaKind::kF16, fp4 = kind == MmaKind::kMxf4nvf4;
  const Op op = begin(scaled ? "tcgen05.mma.block_scale" : "tcgen05.mma", where);
  p = one_lane(op, p);
  using I = InstructionDescriptor;
  if (op.is("accumulate")) accumulate = !accumulate;
  if (op.is("a.start")) a += 2;
  if (op.is("b.start")) b += 2;
  if (op.is("a.stride")) a += uint64_t{8} << SharedDescriptor::kStride.first;
  if (op.is("b.stride")) b += uint64_t{8} << SharedDescriptor::kStride.first;
  if (op.is("a.leading")) a += uint64_t{8} << SharedDescriptor::kLeading.first;
  if (op.is("b.leading")) b += uint64_t{8} << SharedDescriptor::kLeading.first;
  if (op.is("a.swizzle")) a ^= uint64_t{6} << SharedDescriptor::kSwizzle.first;
  if (op.is("b.swizzle")) b ^= uint64_t{6} << SharedDescriptor::kSwizzle.first;
  if (op.is("scale id a")) instruction ^= 1u << I::kScaleIdA.first;
  if (op.is("scale id b")) instruction ^= 1u << I::kScaleIdB.first;
  if (op.is("a.format")) instruction ^= 1u << I::kA.first;
  if (op.is("b.format")) instruction ^= 1u << I::kB.first;
  if (op.is("a.major")) instruction ^= 1u << I::kMajorA.first;
  if (op.is("b.major")) instruction ^= 1u << I::kMajorB.first;
  if (op.is("n")) instruction -= 2u << I::kN.first;
  if (op.is("scale a")) ++scale_a;
  if (op.is("scale b")) ++scale_b;
  if (op.is("d")) ++d;

  const I i{instruction};
  const int m = i.m(scaled), n = i.n();
  const SharedDescriptor from_a(a), from_b(b);
  if (!from_a.valid || !from_b.valid) grid.fail(w, op, "descriptor", "not a valid shared-memory descriptor");
  const bool a_mn = I::kMajorA.of(instruction), b_mn = I::kMajorB.of(instruction);
  if ((a_mn && from_a.line_bytes != 128) || (b_mn && from_b.line_bytes != 128))
    grid.fail(w, op, "descriptor", "MN-major operands are taken with a swizzle of 128 bytes");
  const int element_bytes = kind == MmaKind::kF16 ? 2 : 1;
  if (a_mn && m / ctas * element_bytes > 128) grid.mark(op, "a.leading");
  if (b_mn && n / ctas * element_bytes > 128) grid.mark(op, "b.leading");
  const uint64_t unsupported = I::kSparse.of(instruction) | I::kNegate.of(instruction) | (fp4 && (a_mn || b_mn)) |
                               (instruction & (scaled ? I::kScaledReserved : I::kF16Reserved));
  if (unsupported || m != 128 * ctas || n < 16 || n > 256 || n % 16 ||
      (!scaled && I::kF16Accumulator.of(instruction) != 1) || (scaled && I::kLongK.of(instruction)))
    grid.fail(w, op, "descriptor", "an instruction descriptor with fields that this machine does not take");
  const auto a_format = static_cast<uint32_t>(I::kA.of(instruction)),
             b_format = static_cast<uint32_t>(I::kB.of(instruction));
  if (fp4 ? a_format != 1 || b_format != 1 : a_format > 1 || b_format > 1)
    grid.fail(w, op, "descriptor", "unknown element format");
  if (fp4 && (I::kScaleIdA.of(instruction) || I::kScaleIdB.of(instruction)))
    grid.fail(w, op, "descriptor", "four scales take the whole word: their id is 0");

  for (int lane = 0; lane < kLanes; ++lane) {
    if (!p[lane]) continue;
    const uint32_t step = ++w.cta->tensor_step;
    w.cta->tensor_queue.push_back([=, this, group = tensor_ctas(op, ctas), issued = Issued(w)] {
      const auto d_column = static_cast<int>(d & 0xffff);
      const int rows = m / ctas, lines = n / ctas;  // of A and D, of B in each CTA
      const uint32_t reads = grid.record(w, op, Proxy::kAsync, false, w.cta->tensor_component, step);
      const uint32_t tmem_reads = grid.record(w, op, Proxy::kTensor, false, w.cta->tensor_component, step);
      const uint32_t writes = grid.record(w, op, Proxy::kTensor, true, w.cta->tensor_component, step);
      const auto take = [&](Cta& in, uint32_t format, const SharedDescriptor& o, bool mn_major, int count) {
        const uint32_t elements = kind == MmaKind::kF16 ? 16 : 32;
        const uint32_t across = mn_major ? elements : static_cast<uint32_t>(count),
                       along = mn_major ? static_cast<uint32_t>(count) * kLineBytes / elements : kLineBytes;
        for (uint32_t line = 0; line < across; ++line)
          for (uint32_t at = 0; at < along; at += 16)
            grid.touch_shared_of(in, w, op, reads, issued.view(), mn_major ? o.mn_major(at, line) : o.k_major(line, at),
                                 16);
        return gather(in, kind, format, o, mn_major, count);
      };
      std::vector<float> vb;
      for (Cta* in : group) {
        const auto part = take(*in, b_format, from_b, b_mn, lines);
        vb.insert(vb.end(), part.begin(), part.end());
      }
      const int elements = static_cast<int>(vb.size()) / n, blocks = fp4 ? 4 : 1, block = elements / blocks;
      std::vector<float> vb_turned(vb.size());
      for (int c = 0; c < n; ++c)
        for (int e = 0; e < elements; ++e)
          vb_turned[static_cast<size_t>(e * n + c)] = vb[static_cast<size_t>(c * elements + e)];
      for (Cta* in : group) {
        const auto va = take(*in, a_format, from_a, a_mn, rows);
        if (accumulate) grid.touch_tmem_of(*in, w, op, tmem_reads, issued.view(), 0, rows, d_column, n);
        std::vector<float> sa(static_cast<size_t>(rows * blocks), 1.0f), sb(static_cast<size_t>(n * blocks), 1.0f);
        const auto load = [&](std::vector<float>& s, uint32_t tmem, int count, uint64_t id) {
          const bool e8m0 = I::kScaleType.of(instruction);
          const auto column = static_cast<int>(tmem & 0xffff);
          grid.touch_tmem_of(*in, w, op, tmem_reads, issued.view(), 0, kTmemLanes, column, (count + 31) / 32);
          for (int line = 0; line < count; ++line) {
            const uint32_t word = in->tmem[static_cast<size_t>(line % 32 * kTmemColumns + column + line / 32)];
            for (int j = 0; j < blocks; ++j)
              s[static_cast<size_t>(line * blocks + j)] =
                  scale_value(e8m0, word >> (8 * (static_cast<int>(id) + j)) & 255);
          }
        };
        if (scaled) {
          load(sa, scale_a, rows, I::kScaleIdA.of(instruction));
          load(sb, scale_b, n, I::kScaleIdB.of(instruction));
        }
        grid.touch_tmem_of(*in, w, op, writes, issued.view(), 0, rows, d_column, n);
        std::array<float, 256> sum, part;
        for (int r = 0; r < rows; ++r) {
          uint32_t* words = &in->tmem[static_cast<size_t>(r * kTmemColumns + d_column)];
          for (int c = 0; c < n; ++c) sum[c] = accumulate ? __builtin_bit_cast(float, words[c]) : 0.0f;
          for (int j = 0; j < blocks; ++j) {
            part.fill(0.0f);
            for (int e = j * block; e < (j + 1) * block; ++e) {
              const float x = va[static_cast<size_t>(r * elements + e)], *y = &vb_turned[static_cast<size_t>(e * n)];
              for (int c = 0; c < n; ++c) part[c] += x * y[c];
            }
            const double scale_r = sa[static_cast<size_t>(r * blocks + j)];  // a product of two scales may leave FP32
            for (int c = 0; c < n; ++c)
              sum[c] +=
                  scaled ? static_cast<float>(part[c] * (scale_r * sb[static_cast<size_t>(c * blocks + j)])) : part[c];
          }
          for (int c = 0; c < n; ++c) words[c] = __builtin_bit_cast(uint32_t, sum[c]);
        }
      }
    });
  }
}

void Warp::commit(const char* name, int ctas, barrier& b, pred p, Where where) {
  const Op op = begin(name, where);
  p = one_lane(op, p);
  const uint32_t address = grid.shared_offset(w, op, &b, sizeof b);
  for (int i = 0; i < kLanes; ++i) {
    if (!p[i]) continue;
    auto group = tensor_ctas(op, ctas);
    if (op.is("one")) group.pop_back();
    const uint32_t step = ++w.cta->tensor_step;
    w.cta->tensor_queue.push_back([=, this, issued = Issued(w)] {
      const uint32_t record = grid.record(w, op, Proxy::kAsync, false, w.cta->tensor_component, step);
      Clock done = issued.generic;  // what the tensor core did came after what its issuer had waited for,
      done.forget(w.component);     // but releases no write of the issuer's own
      done.raise(w.cta->tensor_component, step);
      for (Cta* in : group) {
        grid.touch_shared_of(*in, w, op, record, issued.view(), address, sizeof(barrier));
        grid.arrive(w, op, grid.barrier_of(*in, w, op, address), 1, done, nullptr);
      }
    });
  }
}

}  // namespace mxmoe::interpreter
