"""dequantize: the inverse of one copy, fl(fl(element * block scale) * global scale)."""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.groups import rows_of_tile
from mxmoe.backends.triton.kernels.launch import padded_length, row_tiles
from mxmoe.backends.triton.kernels.numerics import decode, decode_scale, store_float
from mxmoe.backends.triton.kernels.target import Target, group_slots, raw
from mxmoe.formats import FORMATS


@triton.jit
def element_of(codes, MAX: tl.constexpr):
    if MAX == 448.0:
        return decode(codes, 3, -6, 8)
    elif MAX == 57344.0:
        return decode(codes, 2, -14, 8)
    else:
        return decode(codes, 1, 0, 4)


@triton.jit
def dequantize_kernel(values, scales, global_scale, offs, out, R, L, P, num_groups, stride_b, stride_r, stride_l,
                      COLUMN: tl.constexpr, SCOPE: tl.constexpr, MAX: tl.constexpr, NVFP4: tl.constexpr, EP: tl.constexpr,
                      BR: tl.constexpr, BL: tl.constexpr):  # fmt: skip
    block: tl.constexpr = 16 if NVFP4 else 32
    tile, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    p, rows, live, stored, group, _ = rows_of_tile(offs, num_groups, R, tile, BR, EP)
    if EP > 0:  # noqa: SIM102  nothing to write
        if tl.max(stored.to(tl.int32), 0) == 0:
            return
    c = tl.program_id(1) * BL + tl.arange(0, BL)
    mask = live[:, None] & (c < L)[None, :]
    if COLUMN:
        line, position, lines, length = c[None, :], p[:, None], L, P
    else:
        line, position, lines, length = rows[:, None], c[None, :], R, L
    line = batch * lines + line
    if MAX == 6.0:
        codes = tl.load(values + line * ((length + 1) // 2) + position // 2, mask=mask, other=0).to(tl.int32)
        codes = (codes >> (4 * (position & 1))) & 15
    else:
        at = values + (batch * P + p)[:, None] * L + c[None, :] if COLUMN else values + line * L + position
        codes = tl.load(at, mask=mask, other=0).to(tl.int32)
    byte = tl.load(scales + line * ((length + block - 1) // block) + position // block, mask=mask, other=0).to(tl.int32)
    x = element_of(codes, MAX) * decode_scale(byte, NVFP4)
    if NVFP4:
        if SCOPE == "row":
            x *= tl.load(global_scale + batch * R + rows, mask=live, other=0.0)[:, None]
        elif SCOPE == "tensor":
            x *= tl.load(global_scale)
        else:
            x *= tl.load(global_scale + (batch if EP == 0 else tl.minimum(group, num_groups - 1)))
    at = out + batch * stride_b + rows.to(tl.int64)[:, None] * stride_r + c[None, :] * stride_l
    store_float(at, tl.where(live[:, None], x, 0.0), stored[:, None] & (c < L)[None, :])


def dequantize(on: Target, values, scales, global_scale, offs_E, format, axis, scope, out_BRL):
    fmt = FORMATS[format]
    batches, num_rows, length = out_BRL.shape
    num_groups, slots = group_slots(offs_E)
    c = on.config("dequantize")
    grid = (row_tiles(num_rows, offs_E, c), triton.cdiv(length, c["BL"]), batches)
    on.run(
        dequantize_kernel, grid, values=raw(values), scales=raw(scales), global_scale=global_scale, offs=offs_E, out=raw(out_BRL),
        R=num_rows, L=length, P=padded_length(num_rows, offs_E), num_groups=num_groups,
        stride_b=out_BRL.stride(0), stride_r=out_BRL.stride(1), stride_l=out_BRL.stride(2), COLUMN=axis == "column", SCOPE=scope,
        MAX=fmt.max, NVFP4=fmt.has_global_scale, EP=slots, **c,
    )  # fmt: skip
