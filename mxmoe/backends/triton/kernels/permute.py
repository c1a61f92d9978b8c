"""permute: rows of tokens in the order of their experts, as they are or quantized."""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.copies import store_copies
from mxmoe.backends.triton.kernels.groups import rows_of_tile
from mxmoe.backends.triton.kernels.launch import Copies, row_tiles
from mxmoe.backends.triton.kernels.numerics import load_float
from mxmoe.backends.triton.kernels.target import Target, raw


@triton.jit
def token_rows(permutation, rows, live, top_k):
    """(whether a row has a slot, its slot, its token) of routed rows."""
    slot = tl.load(permutation + rows, mask=live, other=-1)
    return slot >= 0, slot, (slot // top_k).to(tl.int64)


@triton.jit
def permute_kernel(x, permutation, offs, out, row_values, row_scales, column_values, column_scales, R, L, P, num_groups, top_k,
                   stride_r, MAX: tl.constexpr, FLOOR: tl.constexpr, EP: tl.constexpr, BR: tl.constexpr,
                   BL: tl.constexpr):  # fmt: skip
    tile, col0 = tl.program_id(0), tl.program_id(1) * BL
    _, rows, live, stored, _, _ = rows_of_tile(offs, num_groups, R, tile, BR, EP)
    if EP > 0:  # noqa: SIM102  nothing to write
        if (tl.max(stored.to(tl.int32), 0) == 0) & (tile * BR >= P):
            return
    c = col0 + tl.arange(0, BL)
    filled, _, token = token_rows(permutation, rows, live, top_k)
    at, mask = x + token[:, None] * stride_r + c[None, :], filled[:, None] & (c < L)[None, :]
    if out is not None:
        tl.store(out + rows.to(tl.int64)[:, None] * L + c[None, :], tl.load(at, mask=mask, other=0),
                 mask=stored[:, None] & (c < L)[None, :])  # fmt: skip
    else:
        store_copies(load_float(at, mask), tile, rows, live, stored, col0, L, row_values, row_scales, column_values,
                     column_scales, R, P, L, MAX, FLOOR, BR, BL)  # fmt: skip


def permute(on: Target, x, permutation, top_k, out, offs=None, copies=None):
    length = x.shape[1]
    made = Copies.of(copies, offs, len(permutation))
    c = on.config("rows", column=made.column[0] is not None)
    if out is not None:
        offs = None  # the order of the output's rows is all that counts
    on.run(
        permute_kernel, (row_tiles(len(permutation), offs, c), triton.cdiv(length, c["BL"])), x=raw(x), permutation=permutation,
        offs=offs, out=raw(out), R=len(permutation), L=length, top_k=top_k, stride_r=x.stride(0), **made.arguments(offs), **c,
    )  # fmt: skip
