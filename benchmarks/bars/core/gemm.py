"""grouped_mm and grouped_mm_wgrad on random operand bytes against FP64, elementwise.

The bound of docs/numerics.md: |y - y64| <= 2^-8 |y64| + C * 2^-23 (|A||B|), the first term for a BF16 output. To it comes
C * 2^-126, because products and sums below may be flushed to zero, and for BF16 operands 2^-126 (|A| + |B|) summed, because BF16
numbers below count as zero on AVX-512. A and B are the FP32 values of the operand bytes: where they, or a sum, may exceed FP32 the
result may be Inf or NaN, as accumulating in FP32 gives it.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.bars.harness import Bar, Run
from mxmoe import decode, grouped_mm, grouped_mm_wgrad, layout
from mxmoe.backends import host
from mxmoe.formats import FORMATS, MXTensor
from tests.helpers import backends_for

CASES = 10_000
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
PAIRS = [(a, b) for a in (*DTYPES, *FORMATS) for b in (*DTYPES, *FORMATS) if a == b or a in FORMATS or b in FORMATS]
FP32_MAX = float(torch.finfo(torch.float32).max)
BF16_MAX = float(torch.finfo(torch.bfloat16).max)
GLOBAL_BITS = 12  # global scales lie within 2^-12 .. 2^12


class Random:
    """Choices of one case."""

    def __init__(self, seed: int):
        self.g = torch.Generator().manual_seed(seed)

    def int(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.g))

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.g)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g)

    def chance(self, p: float) -> bool:
        return bool(torch.rand(1, generator=self.g) < p)


@dataclass
class Operand:
    """What the verb gets, and what its bytes mean: line = factor * values, FP64; factors are the global scales."""

    given: Tensor | MXTensor
    values: Tensor  # (..., lines, contraction), of the FP32 product of element and block scale
    factors: Tensor  # (..., lines)


def codes(r: Random, element: str, *shape: int) -> Tensor:
    """Any finite element code."""
    if element == "e2m1":
        return r.ints(0, 15, *shape).to(torch.uint8)
    largest = 0x7E if element == "e4m3" else 0x7B
    return (r.ints(0, largest, *shape) | r.ints(0, 1, *shape) << 7).to(torch.uint8)


def scale_bytes(r: Random, element: str, *shape: int) -> Tensor:
    """Block scales: ordinary ones, and in some cases any byte: E8M0 beyond the panels' exact range, NaN (255, E4M3 0x7F) too."""
    if element == "e4m3":
        return (r.ints(0, 0x7E, *shape) | (r.ints(0, 99, *shape) == 0) * (0x7F if r.chance(0.1) else 0)).to(torch.uint8)
    ordinary = r.ints(117, 137, *shape)
    if r.chance(0.7):
        return ordinary.to(torch.uint8)
    edges = torch.tensor([0, 1, 2, 9, 10, 16, 17, 60, 200, 239, 240, 246, 247, 252, 253, 254, 255])
    extreme = edges[r.ints(0, len(edges) - 1 - (not r.chance(0.1)), *shape)]
    return torch.where(r.ints(0, 3, *shape) == 0, extreme, ordinary).to(torch.uint8)


def pack(x: Tensor) -> Tensor:
    """E2M1 codes (..., C) -> (..., ceil(C / 2)), low nibble first."""
    x = torch.nn.functional.pad(x, (0, x.shape[-1] % 2))
    return x[..., ::2] | x[..., 1::2] << 4


def operand(r: Random, format: str, batch: tuple[int, ...], lines: int, length: int, *, columns: bool, offs: Tensor | None = None):
    """Random bytes of `format`, lines x length, as a row copy or (columns) a column copy of the transposed matrix; offs: a column
    copy of groups of rows, whose padding is zero. High precision: a tensor of (lines, length), or transposed."""
    if format in DTYPES:
        x = r.normal(*batch, lines, length) * 2.0 ** r.int(-8, 8)
        if format != "fp16" and r.chance(0.1):
            x = x * 2.0**-125
        x = x.to(DTYPES[format])
        values = x.double()
        given = x.transpose(-1, -2).contiguous() if columns else x
        return Operand(given, values, torch.ones(values.shape[:-1], dtype=torch.double))
    f = FORMATS[format]
    padded = length if offs is None else layout.padded_rows(length, offs.shape[0])
    inside = torch.ones(padded, dtype=torch.bool) if offs is None else _inside(offs, padded)
    blocks = -(-padded // f.block)
    elements = codes(r, f.element, *batch, lines, padded) * inside
    scales = scale_bytes(r, f.scale_element, *batch, lines, blocks)
    if offs is not None:
        scales = scales * torch.nn.functional.pad(inside, (0, -padded % f.block)).unflatten(0, (blocks, f.block)).any(1)
    global_scale, factors, scope = None, torch.ones(*batch, lines, dtype=torch.double), "row"
    if f.has_global_scale:
        scope = "row" if not columns else "group" if offs is not None or batch else "tensor"
        shape = (*batch, lines) if scope == "row" else (offs.shape[0],) if offs is not None else batch or (1,)
        global_scale = torch.exp2((r.normal(*shape) * 4).clamp(-GLOBAL_BITS, GLOBAL_BITS))
        factors = global_scale.double() if offs is not None else global_scale.double().reshape(*batch, -1).expand(*batch, lines)
    stored = pack(elements) if f.bits == 4 else elements.transpose(-1, -2).contiguous() if columns else elements
    shape = (*batch, length, lines) if columns else (*batch, lines, length)
    given = MXTensor(
        stored if f.bits == 4 else stored.view(f.values_dtype), scales.view(f.scales_dtype), global_scale, format,
        "column" if columns else "row", shape, scope, "plain", offs,
    )  # fmt: skip
    values = decode(elements, f.element) * decode(scales, f.scale_element).repeat_interleave(f.block, -1)[..., :padded]
    return Operand(given, values.double(), factors)


def _inside(offs: Tensor, padded: int) -> Tensor:
    """Which positions of the padded contraction hold rows of a group."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    inside = torch.zeros(padded, dtype=torch.bool)
    for start, size in zip(layout.padded_starts(offs).tolist(), sizes.tolist(), strict=True):
        inside[start : start + size] = True
    return inside


def violations(got: Tensor, a: Tensor, b: Tensor, factors: Tensor, is_bf16: bool, bias: Tensor | float = 0.0) -> int:
    """Elements of `got` (ISA, lines of a, lines of b) that break the bound of factors * (a . b^T) + bias; a, b FP64 lines;
    is_bf16: an operand is, and its small numbers may count as zero."""
    length = a.shape[1]
    exact = a @ b.T
    expected = exact * factors + bias
    a, b = (t.abs().masked_fill(~t.isfinite(), 0.0) for t in (a, b))
    magnitude = a @ b.T
    flushed = length + (a.sum(1)[:, None] + b.sum(1) if is_bf16 else 0)  # in units of 2^-126
    bound = factors * (length * 2.0**-23 * magnitude + 2.0**-126 * flushed) + 2.0**-23 * abs(bias) + 2.0**-126
    narrow = got.dtype == torch.bfloat16
    if narrow:
        bound = bound + 2.0**-8 * expected.abs()
    y = got.double()
    fits = (y - expected).abs() <= bound
    same = (y.isnan() & expected.isnan()) | (y == expected)
    may_overflow = magnitude * factors.clamp(min=1) * 2.0**GLOBAL_BITS >= (BF16_MAX if narrow else FP32_MAX)
    return int((~torch.where(may_overflow, fits | ~y.isfinite(), fits | same)).sum())


def grouped_mm_case(seed: int) -> int:
    """Violations of one random grouped_mm, over all ISAs."""
    r = Random(seed)
    a_format, b_format = PAIRS[seed % len(PAIRS)]
    experts, rows, outputs, length = r.int(1, 5), r.int(0, 40), r.int(1, 40), r.int(1, 150)
    offs = r.ints(0, rows, experts).sort().values.int()
    columns = r.chance(0.3)
    a = operand(r, a_format, (), rows, length, columns=False)
    b = operand(r, b_format, (experts,), outputs, length, columns=columns)
    b_given = b.given.transpose(1, 2) if columns and isinstance(b.given, Tensor) else b.given
    bias = r.normal(experts, outputs) if r.chance(0.3) else None
    out_dtype = torch.bfloat16 if r.chance(0.5) else torch.float32
    got = on_every_isa(lambda: grouped_mm(a.given, b_given, offs, bias=bias, out_dtype=out_dtype))
    end = int(offs[-1])
    wrong, first = int(got[:, end:].count_nonzero()), 0
    for e, last in enumerate(offs.tolist()):
        rows_e = slice(first, last)
        factors = a.factors[rows_e, None] * b.factors[e]
        is_bf16 = "bf16" in (a_format, b_format)
        added = 0.0 if bias is None else bias[e].double()
        wrong += violations(got[:, rows_e], a.values[rows_e], b.values[e], factors, is_bf16, added)
        first = last
    return wrong


def grouped_mm_wgrad_case(seed: int) -> int:
    """Violations of one random grouped_mm_wgrad, over all ISAs."""
    r = Random(seed)
    pairs = [(a, b) for a, b in PAIRS if (a in FORMATS) == (b in FORMATS)]
    a_format, b_format = pairs[seed % len(pairs)]
    experts, rows, outputs, width = r.int(1, 4), r.int(0, 200), r.int(1, 30), r.int(1, 40)
    offs = r.ints(0, rows, experts).sort().values.int()
    quantized = a_format in FORMATS
    a, b = (
        operand(r, format, (), lines, rows, columns=True, offs=offs if quantized else None)
        for format, lines in ((a_format, outputs), (b_format, width))
    )
    out_dtype = torch.bfloat16 if r.chance(0.5) else torch.float32
    got = on_every_isa(lambda: grouped_mm_wgrad(a.given, b.given, offs, out_dtype=out_dtype))
    starts = layout.padded_starts(offs).tolist() if quantized else [0, *offs[:-1].tolist()]
    sizes = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()
    wrong = 0
    for e, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        own = slice(start, start + size)
        factors = torch.ones(1, dtype=torch.double)
        for t, format in ((a, a_format), (b, b_format)):
            factors = factors * (t.factors[e] if format == "nvfp4" else 1.0)
        wrong += violations(got[:, e], a.values[:, own], b.values[:, own], factors, a_format == "bf16")
    return wrong


def on_every_isa(call) -> Tensor:
    """Outputs (ISA, ...)."""
    results = []
    for backend in backends_for("grouped_mm")[1:]:
        with host.use_isa(backend.isa):
            results.append(call())
    return torch.stack(results)


def broken_elements(case, run: Run) -> float:
    return sum(case(seed) for seed in run.steps(range(run.count(CASES))))


BARS = [
    Bar("grouped_mm within its bound of FP64", "<=", 0, "elements outside", partial(broken_elements, grouped_mm_case)),
    Bar("grouped_mm_wgrad within its bound of FP64", "<=", 0, "elements outside", partial(broken_elements, grouped_mm_wgrad_case)),
]
