"""quantize: a tile of rows in, its parts of the row copy and the column copy out, in one pass; NVFP4 reads its global scales from a
pass before."""

import torch
import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.copies import store_column_copy, store_row_copy
from mxmoe.backends.triton.kernels.groups import rows_of_tile
from mxmoe.backends.triton.kernels.launch import padded_length, row_tiles
from mxmoe.backends.triton.kernels.numerics import INF_BITS, MAGNITUDE, NAN_BITS, bits_of, float_of, load_float
from mxmoe.backends.triton.kernels.target import Target, group_slots, raw
from mxmoe.formats import FORMATS, QuantizeOptions


@triton.jit
def global_scale_of(amax):
    """s_dec of a scope whose largest magnitude has these bits."""
    s_dec = tl.div_rn(float_of(amax), tl.full(amax.shape, 2688.0, tl.float32))
    s_dec = tl.where(s_dec == 0.0, 1.0, s_dec)
    return tl.where(amax >= INF_BITS, float_of(tl.full(amax.shape, NAN_BITS, tl.int32)), s_dec)


@triton.jit
def scope_amax_kernel(x, offs, amax_out, row_global, R, L, num_groups, stride_b, stride_r, stride_l, SCOPE: tl.constexpr,
                      EP: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr):  # fmt: skip
    """SCOPE "row": the rows' global scales; else the bits of each scope's largest magnitude, by a maximum of integers."""
    batch = tl.program_id(1)
    _, rows, live, stored, group, _ = rows_of_tile(offs, num_groups, R, tl.program_id(0), BR, EP)
    at = x + batch.to(tl.int64) * stride_b + rows.to(tl.int64)[:, None] * stride_r
    amax = tl.zeros((BR,), tl.int32)
    for col0 in range(0, L, BL):
        c = col0 + tl.arange(0, BL)
        values = load_float(at + c[None, :] * stride_l, live[:, None] & (c < L)[None, :])
        amax = tl.maximum(amax, tl.max(bits_of(values) & MAGNITUDE, 1))
    if SCOPE == "row":
        tl.store(row_global + (batch * R + rows), tl.where(live, global_scale_of(amax), 0.0), mask=stored)
    else:
        scope = 0 if SCOPE == "tensor" else (batch if EP == 0 else group)
        tl.atomic_max(amax_out + scope, tl.max(amax, 0), mask=(group < num_groups) if EP else None)


@triton.jit
def global_scales_kernel(amax, row_global, column_global, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s_dec = global_scale_of(tl.load(amax + i, mask=i < count, other=0))
    if row_global is not None:
        tl.store(row_global + i, s_dec, mask=i < count)
    if column_global is not None:
        tl.store(column_global + i, s_dec, mask=i < count)


@triton.jit
def quantize_kernel(x, offs, row_values, row_scales, row_global, column_values, column_scales, column_global, R, L, P, num_groups,
                    stride_b, stride_r, stride_l, SCOPE: tl.constexpr, MAX: tl.constexpr, NVFP4: tl.constexpr,
                    FLOOR: tl.constexpr, EP: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr):  # fmt: skip
    tile, col0, batch = tl.program_id(0), tl.program_id(1) * BL, tl.program_id(2)
    _, rows, live, stored, group, _ = rows_of_tile(offs, num_groups, R, tile, BR, EP)
    if EP > 0:  # noqa: SIM102  nothing to write
        if (tl.max(stored.to(tl.int32), 0) == 0) & (tile * BR >= P):
            return
    c = col0 + tl.arange(0, BL)
    at = x + batch.to(tl.int64) * stride_b + rows.to(tl.int64)[:, None] * stride_r + c[None, :] * stride_l
    values = load_float(at, live[:, None] & (c < L)[None, :])
    scope = 0 if SCOPE == "tensor" else (batch if EP == 0 else tl.minimum(group, num_groups - 1))
    if row_values is not None:
        s_dec = tl.full((BR,), 1.0, tl.float32)
        if NVFP4:
            index = batch * R + rows if SCOPE == "row" else scope + 0 * rows
            s_dec = tl.load(row_global + index, mask=live, other=1.0)
        store_row_copy(values, rows, live, stored, col0, L, row_values, row_scales, s_dec, batch, R, L, MAX, NVFP4, FLOOR, BR, BL)
    if column_values is not None:
        scalar = tl.load(column_global + scope) if NVFP4 else 1.0
        store_column_copy(values, tile, live, col0, L, column_values, column_scales, scalar, batch, P, L, MAX, NVFP4, FLOOR, BR, BL)


def quantize(on: Target, x_BRL, offs_E, format, options: QuantizeOptions, row, column):
    for name in ("seed", "hadamard", "four_six", "block_2d"):
        if getattr(options, name) not in (None, False):
            raise NotImplementedError(f"the triton backend has no quantize with option {name}")
    fmt = FORMATS[format]
    batches, num_rows, length = x_BRL.shape
    num_groups, slots = group_slots(offs_E)
    row, column = (tuple(map(raw, copy or (None,) * 3)) for copy in (row, column))
    padded = padded_length(num_rows, offs_E) if column[0] is not None else 0
    c = on.config("quantize", column=column[0] is not None)
    shared = dict(x=raw(x_BRL), offs=offs_E, R=num_rows, L=length, num_groups=num_groups, stride_b=x_BRL.stride(0),
                  stride_r=x_BRL.stride(1), stride_l=x_BRL.stride(2), SCOPE=options.scope, EP=slots, **c)  # fmt: skip
    tiles = row_tiles(num_rows, offs_E, c)
    if fmt.has_global_scale:
        outputs = dict(row_global=row[2], column_global=column[2])
        if options.scope == "row":
            on.run(scope_amax_kernel, (tiles, batches), **shared, amax_out=None, row_global=row[2])
        else:
            count = next(t.numel() for t in outputs.values() if t is not None)
            amax = x_BRL.new_zeros(count, dtype=torch.int32)
            on.run(scope_amax_kernel, (tiles, batches), **shared, amax_out=amax, row_global=None)
            on.run(global_scales_kernel, (triton.cdiv(count, 128),), amax=amax, **outputs, count=count, BLOCK=128)
    on.run(
        quantize_kernel, (tiles, triton.cdiv(length, c["BL"]), batches), **shared, P=padded, row_values=row[0], row_scales=row[1],
        row_global=row[2], column_values=column[0], column_scales=column[1], column_global=column[2], MAX=fmt.max,
        NVFP4=fmt.has_global_scale, FLOOR=options.scale_mode == "floor",
    )  # fmt: skip
