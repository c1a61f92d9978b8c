// Elements with block scales as BF16, from shared memory to shared memory: what sm_90a multiplies, whose tensor core
// has no block scales.
//
// The exponent and mantissa of an element, shifted to where BF16 has its own, are its value times a power of two that
// depends on the format alone, subnormals included: one product undoes that, a second one brings in the block's scale.
// Exact where the result is a normal number; below 2^-126 it is rounded to BF16's subnormals, 2^-133 apart.
#pragma once
#include <cstdint>

#include "cuda/kernels/operand_ring.h"

namespace mxmoe::cuda {

// Where an element's bits go, for the two of a word at once, each in the low bits of its half.
struct ElementBits {
  uint32_t sign, magnitude;        // masks
  int sign_shift, shift;           // to BF16's
  uint32_t carry, overflow, fill;  // Inf and NaN: magnitude + carry has the overflow bit, times `fill` the exponent
  uint32_t undo;                   // BF16: the power of two
};

MXMOE_FACT uint32_t in_both_halves(uint32_t x) {
  return x | x << 16;
}

template <class E>
MXMOE_FACT ElementBits element_bits() {
  const int shift = 7 - E::kMantissa, top = E::kBits - 1 + shift;  // of BF16's mantissa, 7 bits; past the exponent
  const bool ieee = E::kPoison > E::kMaxCode + 1;                  // the last exponent is Inf and NaN, else one code
  const uint32_t carry = E::kPoison == 0 ? 0 : ieee ? 1u << 7 : 1u << shift;
  return {in_both_halves(1u << (E::kBits - 1)),
          in_both_halves((1u << (E::kBits - 1)) - 1),
          16 - E::kBits,
          shift,
          in_both_halves(carry),
          in_both_halves(1u << top),
          (1u << (15 - top)) - 1,
          in_both_halves(static_cast<uint32_t>(254 - E::kBias) << 7)};
}
static_assert(element_bits<E4M3>().overflow == 0x08000800u && element_bits<E4M3>().carry == 0x00100010u);
static_assert(element_bits<E5M2>().overflow == 0x10001000u && element_bits<E5M2>().carry == 0x00800080u);

// Without the block's scale.
template <class M, class U>
MXMOE_KERNEL U unscaled_bf16x2(M& m, const ElementBits& e, U pair) {
  const U placed = (pair & e.magnitude) << e.shift;
  const U special = ((placed + e.carry) & e.overflow) * e.fill;
  return m.mul_bf16x2(placed | special | (pair & e.sign) << e.sign_shift, m.splat(e.undo));
}

// A block's scale in both halves: E4M3 with NVFP4, else E8M0.
template <Operand kOperand, class M, class U>
MXMOE_KERNEL U scale_bf16x2(M& m, U byte) {
  if constexpr (kOperand == Operand::kNvfp4) return unscaled_bf16x2(m, element_bits<E4M3>(), byte | byte << 16);
  const U finite = m.select(byte == 0u, U{} + 0x40u, byte << 7);  // 2^-127 is a subnormal
  const U scale = m.select(byte == 255u, U{} + 0x7fffu, finite);
  return scale | scale << 16;
}

// 16 elements in `words`, times the scales of each two of them, as 32 bytes at `to` and `to` + 16 swizzled.
template <Operand kOperand, class M, class Words, class U>
MXMOE_KERNEL void store_bf16(M& m, const ElementBits& e, Words& words, const U (&scales)[8], U to, U offset) {
  U pair[8];
  unrolled<8>([&](int i) {
    U codes;
    if constexpr (kOperand == Operand::kNvfp4) {
      codes = words[i / 4] >> (8 * (i % 4));
      codes = (codes & 0xfu) | (codes & 0xf0u) << 12;
    } else {
      codes = words[i / 2] >> (16 * (i % 2));
      codes = (codes & 0xffu) | (codes & 0xff00u) << 8;
    }
    pair[i] = m.mul_bf16x2(unscaled_bf16x2(m, e, codes), scales[i]);
  });
  const auto all = m.lane_idx() >= 0;
  m.st_shared_v4(to + swizzled(Swizzle::k128B, offset), pair[0], pair[1], pair[2], pair[3], all);
  m.st_shared_v4(to + swizzled(Swizzle::k128B, offset + 16u), pair[4], pair[5], pair[6], pair[7], all);
}

// Of a K-major tile of 128-byte lines, 64 elements of 32 lines, a line of each lane: elements 64 * part on. `scales`:
// of the slot. `to`: a K-major tile of 128-byte lines.
template <Operand kOperand, class M>
MXMOE_KERNEL void lines_to_bf16(M& m, const ElementBits& e, uint32_t from, uint32_t scales, uint32_t to, int first_line,
                                int part) {
  using U = typename M::template lane<uint32_t>;
  constexpr bool kFp4 = kOperand == Operand::kNvfp4;
  constexpr int kPieceBytes = kFp4 ? 8 : 16;  // of 16 elements
  const U lane = m.template cast<uint32_t>(m.lane_idx());
  const U line = (lane + static_cast<uint32_t>(first_line)) * 128u;
  const int tile = kFp4 ? part : 0, first_block = kFp4 ? 0 : 2 * part;  // four blocks are 64 or 128 elements
  const U blocks =
      m.ld_shared(lane * 16u + (scales + static_cast<uint32_t>(tile * scale_tile::num_bytes + first_line / 8)));
  unrolled<4>([&](int piece) {
    typename M::template registers<uint32_t, kPieceBytes / 4> words;
    const U at = swizzled(Swizzle::k128B, line + static_cast<uint32_t>(kPieceBytes * (4 * part + piece))) + from;
    if constexpr (kFp4)
      m.ld_shared_v2(words, at);
    else
      m.ld_shared_v4(words, at);
    const int block = first_block + (kFp4 ? piece : piece / 2);
    const U scale = scale_bf16x2<kOperand>(m, blocks >> (8 * block) & 255u);
    const U both[8] = {scale, scale, scale, scale, scale, scale, scale, scale};
    store_bf16<kOperand>(m, e, words, both, m.splat(to), line + static_cast<uint32_t>(32 * piece));
  });
}

// Of an MN-major tile of MXFP8, 128 lines of contraction by 128 features: lines 64 * part on, a quarter of them, 16
// features of every fourth line of each lane. `to`: two MN-major tiles of 64 features.
template <class M>
MXMOE_KERNEL void columns_to_bf16(M& m, const ElementBits& e, uint32_t from, uint32_t scales, uint32_t to, int quarter,
                                  int part) {
  using U = typename M::template lane<uint32_t>;
  const U lane = m.template cast<uint32_t>(m.lane_idx()), piece = lane % 8u;
  const int block = 2 * part + quarter / 2;
  const auto scale_of = [&](int feature) {  // of this lane's 16
    const U at = (piece % 2u) * 256u + (piece / 2u) * 4u + (scales + static_cast<uint32_t>(16 * feature));
    return scale_bf16x2<Operand::kMxfp8>(m, m.ld_shared(at) >> (8 * block) & 255u);
  };
  U scale[8];
  unrolled<8>([&](int i) { scale[i] = (scale_of(2 * i) & 0xffffu) | (scale_of(2 * i + 1) & 0xffff0000u); });
  unrolled<4>([&](int i) {
    typename M::template registers<uint32_t, 4> words;
    const U line = (lane / 8u + static_cast<uint32_t>(16 * quarter + 4 * i)) * 128u;
    m.ld_shared_v4(words, swizzled(Swizzle::k128B, line + piece * 16u) + (from + static_cast<uint32_t>(8192 * part)));
    store_bf16<Operand::kMxfp8>(m, e, words, scale, (piece / 4u) * 8192u + to, line + (piece % 4u) * 32u);
  });
}

template <Operand kOperand>
MXMOE_KERNEL ElementBits element_bits_of(int element) {  // of MXFP8: 0 E4M3, 1 E5M2
  if constexpr (kOperand == Operand::kNvfp4) return element_bits<E2M1>();
  return element ? element_bits<E5M2>() : element_bits<E4M3>();
}

// Where a decoder stands in the two rings.
template <class C>
struct Decoding {
  ring<C::Layout::kStages> from;
  ring<C::Halves::kStages> to;
};

// One tile's contraction, by one of eight warps: a quarter of each slot of A or of B, from the ring of codes to that of
// halves, of which `codes` slots hold some.
template <class C, class M>
MXMOE_KERNEL void decode_tile(M& m, operand_ring<typename C::Layout>& codes, operand_ring<typename C::Halves>& halves,
                              Decoding<C>& at, const ElementBits& element, bool is_b, int contraction) {
  using Layout = typename C::Layout;
  constexpr int kStep = C::Halves::kStep;
  const auto one = m.elect_one();
  const int quarter = m.warp_idx() % 4;
  for (int k = 0; k < contraction; at.from.advance()) {
    auto& slot = codes.slots[at.from.slot];
    const uint32_t values = is_b ? m.shared_address(&slot.b[0]) : m.shared_address(&slot.a[0]);
    const uint32_t scales = m.shared_address(is_b ? slot.b_scales : slot.a_scales);
    m.mbarrier_wait(codes.arrived[at.from.slot], at.from.parity);
    for (int part = 0; part < Layout::kStep / kStep && k < contraction; ++part, k += kStep, at.to.advance()) {
      auto& half = halves.slots[at.to.slot];
      const uint32_t to = is_b ? m.shared_address(&half.b[0]) : m.shared_address(&half.a[0]);
      m.mbarrier_wait(halves.finished[at.to.slot], at.to.parity ^ 1);
      if constexpr (Layout::kAColumns) {
        columns_to_bf16(m, element, values, scales, to, quarter, part);
      } else {
        if (Layout::kBColumns && is_b)
          columns_to_bf16(m, element, values, scales, to, quarter, part);
        else
          lines_to_bf16<C::kOperand>(m, element, values, scales, to, 32 * quarter, part);
      }
      m.fence_proxy_async();
      m.syncwarp();
      m.mbarrier_arrive(halves.arrived[at.to.slot], one);
    }
    m.mbarrier_arrive(codes.finished[at.from.slot], one);
  }
}

}  // namespace mxmoe::cuda
