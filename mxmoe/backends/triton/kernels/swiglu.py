"""swiglu and its gradient, in FP32 and rounded once: written as they are, or quantized from that rounded value."""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.copies import store_copies
from mxmoe.backends.triton.kernels.groups import rows_of_tile
from mxmoe.backends.triton.kernels.launch import Copies, row_tiles
from mxmoe.backends.triton.kernels.numerics import load_float, rounded_to, sigmoid, store_float
from mxmoe.backends.triton.kernels.target import Target, raw


@triton.jit
def gate_up(h, rows, live, c, F, stride_h, INTERLEAVED: tl.constexpr):
    """FP32 (gate, up) of columns c of the activation."""
    row = h + rows.to(tl.int64)[:, None] * stride_h
    mask = live[:, None] & (c < F)[None, :]
    if INTERLEAVED:
        return load_float(row + 2 * c[None, :], mask), load_float(row + 2 * c[None, :] + 1, mask)
    else:
        return load_float(row + c[None, :], mask), load_float(row + F + c[None, :], mask)


@triton.jit
def activation(gate, up, alpha, limit, offset):
    """(alpha * g, sigmoid of it, g * sigmoid, u + offset) of clamped g and u; NaN stays. alpha and offset None: 1 and 0."""
    if limit is not None:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    scaled = gate
    if alpha is not None:
        scaled = gate * alpha
    s = sigmoid(scaled)
    if offset is not None:
        up += offset
    return scaled, s, gate * s, up


@triton.jit
def swiglu_kernel(h, offs, out, row_values, row_scales, column_values, column_scales, R, F, P, num_groups, stride_h, stride_r,
                  stride_l, alpha, limit, offset, INTERLEAVED: tl.constexpr, MAX: tl.constexpr, FLOOR: tl.constexpr,
                  EP: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr):  # fmt: skip
    tile, col0 = tl.program_id(0), tl.program_id(1) * BL
    _, rows, live, stored, _, _ = rows_of_tile(offs, num_groups, R, tile, BR, EP)
    if EP > 0:  # noqa: SIM102  nothing to write
        if (tl.max(stored.to(tl.int32), 0) == 0) & (tile * BR >= P):
            return
    c = col0 + tl.arange(0, BL)
    gate, up = gate_up(h, rows, live, c, F, stride_h, INTERLEAVED)
    _, _, gate, up = activation(gate, up, alpha, limit, offset)
    value = tl.where(live[:, None] & (c < F)[None, :], gate * up, 0.0)
    if out is not None:
        at = out + rows.to(tl.int64)[:, None] * stride_r + c[None, :] * stride_l
        store_float(at, value, stored[:, None] & (c < F)[None, :])
    else:
        store_copies(rounded_to(value, h), tile, rows, live, stored, col0, F, row_values, row_scales, column_values,
                     column_scales, R, P, F, MAX, FLOOR, BR, BL)  # fmt: skip


@triton.jit
def swiglu_backward_kernel(da, h, offs, out, row_values, row_scales, column_values, column_scales, R, F, P, num_groups, stride_a,
                           stride_h, stride_r, stride_l, alpha, limit, offset, INTERLEAVED: tl.constexpr, MAX: tl.constexpr,
                           FLOOR: tl.constexpr, EP: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr):  # fmt: skip
    tile, col0 = tl.program_id(0), tl.program_id(1) * BL
    _, rows, live, stored, _, _ = rows_of_tile(offs, num_groups, R, tile, BR, EP)
    if EP > 0:  # noqa: SIM102  nothing to write
        if (tl.max(stored.to(tl.int32), 0) == 0) & (tile * BR >= P):
            return
    c = col0 + tl.arange(0, BL)
    raw_gate, raw_up = gate_up(h, rows, live, c, F, stride_h, INTERLEAVED)
    da = load_float(da + rows.to(tl.int64)[:, None] * stride_a + c[None, :], live[:, None] & (c < F)[None, :])
    scaled, s, gate, up = activation(raw_gate, raw_up, alpha, limit, offset)
    du = da * gate
    dg = (da * up) * (s * (1.0 + scaled * (1.0 - s)))
    if limit is not None:
        dg = tl.where(raw_gate > limit, 0.0, dg)
        du = tl.where(tl.abs(raw_up) > limit, 0.0, du)
    inside = live[:, None] & (c < F)[None, :]
    dg, du = tl.where(inside, dg, 0.0), tl.where(inside, du, 0.0)
    if out is not None:
        row = out + rows.to(tl.int64)[:, None] * stride_r
        mask = stored[:, None] & (c < F)[None, :]
        if INTERLEAVED:
            store_float(row + (2 * c)[None, :] * stride_l, dg, mask)
            store_float(row + (2 * c + 1)[None, :] * stride_l, du, mask)
        else:
            store_float(row + c[None, :] * stride_l, dg, mask)
            store_float(row + (F + c)[None, :] * stride_l, du, mask)
    else:
        dg, du = rounded_to(dg, h), rounded_to(du, h)
        if INTERLEAVED:
            both = tl.reshape(tl.join(dg, du), (BR, 2 * BL))
            store_copies(both, tile, rows, live, stored, 2 * col0, 2 * F, row_values, row_scales, column_values, column_scales,
                         R, P, 2 * F, MAX, FLOOR, BR, 2 * BL)  # fmt: skip
        else:
            store_copies(dg, tile, rows, live, stored, col0, F, row_values, row_scales, column_values, column_scales, R, P,
                         2 * F, MAX, FLOOR, BR, BL)  # fmt: skip
            # the tile's columns past F belong to nobody
            store_copies(du, tile, rows, live, stored, F + col0, 2 * F, row_values, row_scales, column_values, column_scales, R, P,
                         2 * F, MAX, FLOOR, BR, BL)  # fmt: skip


def _arguments(out, a, offs, num_rows, copies):
    """Of either kernel: where the output goes, and the activation's numbers."""
    made = Copies.of(copies, offs, num_rows)
    strides = (0, 0) if out is None else out.stride()
    return made.column[0] is not None, dict(
        offs=offs, out=raw(out), R=num_rows, stride_r=strides[0], stride_l=strides[1], alpha=None if a.alpha == 1 else a.alpha,
        limit=a.limit, offset=a.offset or None, **made.arguments(offs),
    )  # fmt: skip


def swiglu(on: Target, h, offs, activation, interleaved, out, copies=None):
    width = h.shape[1] // 2
    column, arguments = _arguments(out, activation, offs, len(h), copies)
    c = on.config("swiglu", column=column)
    on.run(
        swiglu_kernel, (row_tiles(len(h), offs, c), triton.cdiv(width, c["BL"])), h=raw(h), F=width, stride_h=h.stride(0),
        INTERLEAVED=interleaved, **arguments, **c,
    )  # fmt: skip


def swiglu_backward(on: Target, da, h, offs, activation, interleaved, dh_out, copies=None):
    width = h.shape[1] // 2
    column, arguments = _arguments(dh_out, activation, offs, len(h), copies)
    c = on.config("swiglu", column=column)
    on.run(
        swiglu_backward_kernel, (row_tiles(len(h), offs, c), triton.cdiv(width, c["BL"])), da=raw(da), h=raw(h), F=width,
        stride_a=da.stride(0), stride_h=h.stride(0), INTERLEAVED=interleaved, **arguments, **c,
    )  # fmt: skip
