"""unpermute: the weighted sum of a token's rows, by ascending rank; and its backward form: rows of w * dy, as they are or
quantized, and the weights' gradient."""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.copies import store_copies
from mxmoe.backends.triton.kernels.groups import rows_of_tile
from mxmoe.backends.triton.kernels.launch import Copies, row_tiles
from mxmoe.backends.triton.kernels.numerics import bfloat_bits, float_of, lanes_sum, load_float, store_float
from mxmoe.backends.triton.kernels.permute import token_rows
from mxmoe.backends.triton.kernels.target import Target, raw


@triton.jit
def unpermute_kernel(y, inverse, weights, out, T, L, stride_y, stride_t, stride_l, TOP_K: tl.constexpr, BR: tl.constexpr,
                     BL: tl.constexpr):  # fmt: skip
    t, c = tl.program_id(0) * BR + tl.arange(0, BR), tl.program_id(1) * BL + tl.arange(0, BL)
    total = tl.zeros((BR, BL), tl.float32)
    for k in range(TOP_K):
        row = tl.load(inverse + t.to(tl.int64) * TOP_K + k, mask=t < T, other=-1)
        mask = (row >= 0)[:, None]
        value = load_float(y + row.to(tl.int64)[:, None] * stride_y + c[None, :], mask & (c < L)[None, :])
        if weights is not None:
            value = tl.load(weights + t.to(tl.int64) * TOP_K + k, mask=row >= 0, other=0.0)[:, None] * value
        total = tl.where(mask, total + value, total)
    store_float(out + t.to(tl.int64)[:, None] * stride_t + c[None, :] * stride_l, total, (t < T)[:, None] & (c < L)[None, :])


@triton.jit
def rows_grad_kernel(dy, permutation, weights, offs, out, row_values, row_scales, column_values, column_scales, R, L, P,
                     num_groups, top_k, stride_t, stride_r, stride_l, MAX: tl.constexpr, FLOOR: tl.constexpr, EP: tl.constexpr,
                     BR: tl.constexpr, BL: tl.constexpr):  # fmt: skip
    tile, col0 = tl.program_id(0), tl.program_id(1) * BL
    _, rows, live, stored, _, _ = rows_of_tile(offs, num_groups, R, tile, BR, EP)
    if EP > 0:  # noqa: SIM102  nothing to write
        if (tl.max(stored.to(tl.int32), 0) == 0) & (tile * BR >= P):
            return
    c = col0 + tl.arange(0, BL)
    filled, slot, token = token_rows(permutation, rows, live, top_k)
    value = load_float(dy + token[:, None] * stride_t + c[None, :], filled[:, None] & (c < L)[None, :])
    if weights is not None:
        value = tl.where(filled[:, None], tl.load(weights + slot, mask=filled, other=0.0)[:, None] * value, 0.0)
    if out is not None:
        at = out + rows.to(tl.int64)[:, None] * stride_r + c[None, :] * stride_l
        store_float(at, value, stored[:, None] & (c < L)[None, :])
    else:
        value = float_of(bfloat_bits(value) << 16)
        store_copies(value, tile, rows, live, stored, col0, L, row_values, row_scales, column_values, column_scales, R, P, L, MAX,
                     FLOOR, BR, BL)  # fmt: skip


@triton.jit
def weights_grad_kernel(dy, y, permutation, out, R, L, top_k, stride_t, stride_y, BR: tl.constexpr):
    """Dot products whose lanes add elements 32 apart, in order."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    filled, slot, token = token_rows(permutation, rows, rows < R, top_k)
    lanes = tl.zeros((BR, 32), tl.float32)
    for col0 in range(0, L, 32):
        c = col0 + tl.arange(0, 32)
        mask = filled[:, None] & (c < L)[None, :]
        a = load_float(dy + token[:, None] * stride_t + c[None, :], mask)
        lanes += a * load_float(y + rows.to(tl.int64)[:, None] * stride_y + c[None, :], mask)
    tl.store(out + slot, lanes_sum(lanes, BR), mask=filled)


def unpermute(on: Target, y, inverse, weights, out):
    tokens, length = out.shape
    c = on.config("rows", column=False)
    on.run(
        unpermute_kernel, (triton.cdiv(tokens, c["BR"]), triton.cdiv(length, c["BL"])), y=raw(y), inverse=inverse, weights=weights,
        out=raw(out), T=tokens, L=length, stride_y=y.stride(0), stride_t=out.stride(0), stride_l=out.stride(1),
        TOP_K=inverse.shape[1], **c,
    )  # fmt: skip


def unpermute_backward(on: Target, dy, y, permutation, weights, rows_grad_out, weights_grad_out, offs=None, copies=None):
    num_rows, length = len(permutation), dy.shape[1]
    top_k = num_rows // max(len(dy), 1) or 1
    made = Copies.of(copies, offs, num_rows)
    c = on.config("rows", column=made.column[0] is not None)
    out = raw(rows_grad_out)
    if out is not None:
        offs = None
    on.run(
        rows_grad_kernel, (row_tiles(num_rows, offs, c), triton.cdiv(length, c["BL"])), dy=raw(dy), permutation=permutation,
        weights=weights, offs=offs, out=out, R=num_rows, L=length, top_k=top_k, stride_t=dy.stride(0),
        stride_r=0 if out is None else out.stride(0), stride_l=0 if out is None else out.stride(1), **made.arguments(offs), **c,
    )  # fmt: skip
    if weights_grad_out is not None:
        weights_grad_out.zero_()  # slots without a row
        if y is not None:
            c = on.config("weights_grad")
            on.run(
                weights_grad_kernel, (triton.cdiv(num_rows, c["BR"]),), dy=raw(dy), y=raw(y), permutation=permutation,
                out=weights_grad_out, R=num_rows, L=length, top_k=top_k, stride_t=dy.stride(0), stride_y=y.stride(0), **c,
            )  # fmt: skip
