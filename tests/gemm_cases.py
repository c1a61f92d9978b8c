"""Operands for the tests of the GEMM verbs, and the product in FP64.

An operand is the backend contract's tuple (values, scales, global_scale, format); `dense` is its exact value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mxmoe import layout
from mxmoe.casts import decode
from mxmoe.formats import FORMATS
from tests.helpers import Backend

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPERAND_FORMATS = (*DTYPES, *FORMATS)
REFERENCE = Backend("reference")


@dataclass(frozen=True)
class Problem:
    """offs (E,) with `past` more rows after the last group."""

    sizes: tuple[int, ...]
    outputs: int
    contraction: int
    past: int = 0

    @property
    def offs(self) -> Tensor:
        return torch.tensor(self.sizes).cumsum(0).int()

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.past


def operand(x: Tensor, format: str):
    """x (M, C) or (E, O, C) as an operand with blocks along its last axis."""
    if format in DTYPES:
        return x.to(DTYPES[format]), None, None, format
    t = REFERENCE.quantize(x, format)
    return t.values, t.scales, t.global_scale, format


def column_operand(x: Tensor, format: str, offs: Tensor):
    """x (M, L) as a wgrad operand (L, tokens); and whether its groups are padded."""
    if format in DTYPES:
        return (x.to(DTYPES[format]).T, None, None, format), False
    t = REFERENCE.quantize(x, format, "column", offs=offs, scope="group")
    return (t.values.T if FORMATS[format].bits == 8 else t.values, t.scales, t.global_scale, format), True


def dense(operand) -> Tensor:
    """FP64 values (..., lines, contraction), without the global scale."""
    values, scales, _, format = operand
    if format in DTYPES:
        return values.double()
    fmt = FORMATS[format]
    codes = values.view(torch.uint8)
    if fmt.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    scale = decode(scales, fmt.scale_element).double().repeat_interleave(fmt.block, dim=-1)[..., : codes.shape[-1]]
    return decode(codes, fmt.element).double() * scale


def scaled(x: Tensor, global_scale: Tensor | None) -> Tensor:
    return x if global_scale is None else x * global_scale.double()[..., None]


def products(a, b, offs: Tensor, out_rows: int):
    """grouped_mm in FP64: (a . b, |a| . |b|), zero past the last group."""
    a_MC, b_EOC = scaled(dense(a), a[2]), scaled(dense(b), b[2])
    contraction = min(a_MC.shape[1], b_EOC.shape[2])  # a packed operand may have one element more, zero
    a_MC, b_EOC = a_MC[:, :contraction], b_EOC[..., :contraction]
    y, size = (torch.zeros(out_rows, b_EOC.shape[1], dtype=torch.float64) for _ in range(2))
    start = 0
    for e, end in enumerate(offs.tolist()):
        y[start:end], size[start:end] = a_MC[start:end] @ b_EOC[e].T, a_MC[start:end].abs() @ b_EOC[e].abs().T
        start = end
    return y, size


def wgrad_products(a, b, offs: Tensor, padded: bool):
    """grouped_mm_wgrad in FP64, likewise (E, O, C)."""
    starts = layout.padded_starts(offs).tolist() if padded else [0, *offs.tolist()[:-1]]
    sizes = torch.diff(offs, prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    ys = []
    for e, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        a_e, b_e = (
            dense(o)[:, start : start + size] * (1.0 if o[2] is None else float(o[2][e]))
            for o in (a, b)
        )  # fmt: skip
        ys.append((a_e @ b_e.T, a_e.abs() @ b_e.abs().T))
    return tuple(torch.stack(parts) for parts in zip(*ys, strict=True))


def assert_within_bound(y: Tensor, exact: Tensor, size: Tensor, contraction: int):
    """|y - y64| <= 2^-8 |y64| + C 2^-23 (|A||B|) and C 2^-126, what flushing products below 2^-126 may lose."""
    rounding = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[y.dtype]
    smallest = 2.0**-25 if y.dtype == torch.float16 else 0.0  # half a unit of its subnormals
    bound = rounding * exact.abs() + contraction * 2.0**-23 * size + contraction * 2.0**-126 + smallest
    error = (y.double() - exact).abs()
    worst = (error - bound).argmax() if y.numel() else None
    assert worst is None or bool((error <= bound).all()), (error.flatten()[worst], bound.flatten()[worst])
