"""A tile of FP32 values -> its part of a row copy or a column copy: blocks, scales, elements, packing.

MAX, the largest element, names the element format: 448 E4M3, 57344 E5M2, 6 E2M1. NVFP4: blocks of 16 with E4M3 scales under a
global scale, else blocks of 32 with E8M0 scales.
"""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.numerics import INF_BITS, MAGNITUDE, bits_of, decode, encode, float_of, mx_scale


@triton.jit
def element_codes(x, MAX: tl.constexpr):
    if MAX == 448.0:
        return encode(x, 3, -6, 0x7E, 8)
    elif MAX == 57344.0:
        return encode(x, 2, -14, 0x7B, 8)
    else:
        return encode(x, 1, 0, 0x7, 4)


@triton.jit
def quantize_blocks(x, s_dec, AXIS: tl.constexpr, MAX: tl.constexpr, NVFP4: tl.constexpr, FLOOR: tl.constexpr):
    """Codes of x (3-D), whose blocks lie along AXIS, and the bytes of their scales (without AXIS), both int32."""
    amax = tl.max(bits_of(x) & MAGNITUDE, AXIS)
    if NVFP4:
        s_dec += tl.zeros(amax.shape, tl.float32)
        poisoned = s_dec != s_dec
        byte = encode(tl.div_rn(tl.div_rn(float_of(amax), 6.0), s_dec), 3, -6, 0x7E, 8)
        step = tl.expand_dims(decode(byte, 3, -6, 8) * s_dec, AXIS)
        codes = element_codes(tl.div_rn(x, step), MAX)
        codes = tl.where(tl.expand_dims((byte == 0) | poisoned, AXIS), 0, codes)
        return codes, tl.where(poisoned, 0x7F, byte)
    else:
        byte = mx_scale(amax, MAX, FLOOR)
        factor = float_of((254 - tl.minimum(byte, 253)) << 23)  # 2^(127 - byte); no finite block has byte 254
        codes = element_codes(x * tl.expand_dims(factor, AXIS), MAX)
        return tl.where(tl.expand_dims(amax >= INF_BITS, AXIS), 0 if MAX == 6.0 else 0x7F, codes), byte


@triton.jit
def store_row_copy(x, rows, live, stored, col0, limit, values, scales, s_dec, batch, R, L, MAX: tl.constexpr, NVFP4: tl.constexpr,
                   FLOOR: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr):  # fmt: skip
    """x (BR, BL), columns from col0 on, those below `limit` written; rows that are stored but not live get zeros. s_dec (BR,)."""
    block: tl.constexpr = 16 if NVFP4 else 32
    codes, byte = quantize_blocks(tl.reshape(x, (BR, BL // block, block)), s_dec[:, None], 2, MAX, NVFP4, FLOOR)
    codes = tl.reshape(codes, (BR, BL))
    inside = col0 + tl.arange(0, BL) < limit
    codes = tl.where(live[:, None] & inside[None, :], codes, 0)
    lines = (batch * R + rows).to(tl.int64)[:, None]
    if MAX == 6.0:
        low, high = tl.split(tl.reshape(codes, (BR, BL // 2, 2)))
        pair = col0 // 2 + tl.arange(0, BL // 2)
        tl.store(values + lines * ((L + 1) // 2) + pair[None, :], (low | (high << 4)).to(tl.uint8),
                 mask=stored[:, None] & (2 * pair < limit)[None, :])  # fmt: skip
    else:
        at = values + lines * L + (col0 + tl.arange(0, BL))[None, :]
        tl.store(at, codes.to(tl.uint8), mask=stored[:, None] & inside[None, :])
    k = col0 // block + tl.arange(0, BL // block)
    tl.store(scales + lines * ((L + block - 1) // block) + k[None, :], tl.where(live[:, None], byte, 0).to(tl.uint8),
             mask=stored[:, None] & (k * block < limit)[None, :])  # fmt: skip


@triton.jit
def store_column_copy(x, tile, live, col0, limit, values, scales, s_dec, batch, P, L, MAX: tl.constexpr, NVFP4: tl.constexpr,
                      FLOOR: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr):  # fmt: skip
    """x (BR, BL), rows of a tile of padded rows, those below P written; rows that are not live are zeros. s_dec a scalar."""
    block: tl.constexpr = 16 if NVFP4 else 32
    codes, byte = quantize_blocks(tl.reshape(x, (BR // block, block, BL)), s_dec, 1, MAX, NVFP4, FLOOR)
    codes = tl.where(live[:, None], tl.reshape(codes, (BR, BL)), 0)
    c = col0 + tl.arange(0, BL)
    lines = (batch * L + c).to(tl.int64)
    if MAX == 6.0:
        low, high = tl.split(tl.reshape(tl.trans(codes), (BL, BR // 2, 2)))
        pair = tile * (BR // 2) + tl.arange(0, BR // 2)
        tl.store(values + lines[:, None] * ((P + 1) // 2) + pair[None, :], (low | (high << 4)).to(tl.uint8),
                 mask=(c < limit)[:, None] & (2 * pair < P)[None, :])  # fmt: skip
    else:
        p = tile * BR + tl.arange(0, BR)
        at = values + (batch * P + p).to(tl.int64)[:, None] * L + c[None, :]
        tl.store(at, codes.to(tl.uint8), mask=(p < P)[:, None] & (c < limit)[None, :])
    k = tile * (BR // block) + tl.arange(0, BR // block)
    some = tl.max(tl.reshape(live.to(tl.int32), (BR // block, block)), 1) > 0
    tl.store(scales + lines[None, :] * ((P + block - 1) // block) + k[:, None], tl.where(some[:, None], byte, 0).to(tl.uint8),
             mask=(k * block < P)[:, None] & (c < limit)[None, :])  # fmt: skip


@triton.jit
def store_copies(x, tile, rows, live, stored, col0, limit, row_values, row_scales, column_values, column_scales, R, P, L,
                 MAX: tl.constexpr, FLOOR: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr):  # fmt: skip
    """The wanted copies (not None) of an MX format, of a tile as rows_of_tile describes it."""
    if row_values is not None:
        one = tl.full((BR,), 1.0, tl.float32)
        store_row_copy(x, rows, live, stored, col0, limit, row_values, row_scales, one, 0, R, L, MAX, False, FLOOR, BR, BL)
    if column_values is not None:
        store_column_copy(x, tile, live, col0, limit, column_values, column_scales, 1.0, 0, P, L, MAX, False, FLOOR, BR, BL)
