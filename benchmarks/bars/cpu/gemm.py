"""grouped_mm and grouped_mm_wgrad beside the `vdpbf16ps` peak and `torch._grouped_mm`: 4096 rows, 2048 outputs, contraction 1024.

Quantized operands are `quantize`'s outputs; packing is part of the time.
"""

from functools import partial

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.bars.harness import Bar, Run
from benchmarks.ceilings import peak, share
from mxmoe import grouped_mm, grouped_mm_wgrad, quantize
from mxmoe.layout import offs_from_sizes

ROWS, OUTPUTS, LENGTH = 4096, 2048, 1024
PEAK = "of the peak"
TARGETS = {8: (0.92, 1.05), 64: (0.80, 1.15), 128: (0.70, 1.25)}  # experts: of the peak, over torch


def repeats(run: Run) -> int:
    return 3 if run.quick else 15


def rows_of(run: Run) -> int:
    return run.count(ROWS, least=256)


def flops(rows: int) -> float:
    return 2.0 * rows * OUTPUTS * LENGTH


def balanced(rows: int, experts: int) -> Tensor:
    return (torch.arange(1, experts + 1) * rows // experts).int()


def zipf(rows: int, experts: int, exponent: float = 1.2) -> Tensor:
    """Offsets of groups whose sizes fall as rank^-exponent, in a random order of the experts; all rows are used."""
    shares = torch.arange(1, experts + 1).double() ** -exponent
    ends = (rows * shares.cumsum(0) / shares.sum()).round().long()
    sizes = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.long))
    return offs_from_sizes(sizes[torch.randperm(experts, generator=torch.Generator().manual_seed(0))])


def operands(format: str, rows: int, experts: int):
    """(a, b) of `format`, from the same BF16 values."""
    g = torch.Generator().manual_seed(0)
    pair = torch.randn(rows, LENGTH, generator=g).bfloat16(), torch.randn(experts, OUTPUTS, LENGTH, generator=g).bfloat16()
    return pair if format == "bf16" else tuple(quantize(t, format) for t in pair)


def output(rows: int) -> Tensor:
    return torch.empty(rows, OUTPUTS, dtype=torch.bfloat16)


def grouped_mm_share(format: str, experts: int, run: Run) -> float:
    rows = rows_of(run)
    a, b = operands(format, rows, experts)
    offs, out = balanced(rows, experts), output(rows)
    return share(lambda: grouped_mm(a, b, offs, out=out), flops(rows), peak(flops(rows)), repeats(run))


def grouped_mm_over_torch(format: str, experts: int, run: Run) -> float:
    """torch's allocates its output: the call has no `out=`."""
    rows = rows_of(run)
    (a, b), (x, w) = operands(format, rows, experts), operands("bf16", rows, experts)
    offs, out, w_t = balanced(rows, experts), output(rows), w.transpose(1, 2)
    return timing.speedup(
        lambda: grouped_mm(a, b, offs, out=out), lambda: torch._grouped_mm(x, w_t, offs=offs), repeats(run), warmup=2
    )


def nvfp4_over_mxfp8(experts: int, run: Run) -> float:
    rows = rows_of(run)
    mxfp8, nvfp4 = operands("mxfp8", rows, experts), operands("nvfp4", rows, experts)
    offs, out = balanced(rows, experts), output(rows)
    return timing.speedup(
        lambda: grouped_mm(*nvfp4, offs, out=out), lambda: grouped_mm(*mxfp8, offs, out=out), repeats(run), warmup=2
    )


def skewed_over_balanced(format: str, run: Run) -> float:
    rows, experts = rows_of(run), 64
    a, b = operands(format, rows, experts)
    skewed, even, out = zipf(rows, experts), balanced(rows, experts), output(rows)
    return timing.speedup(
        lambda: grouped_mm(a, b, skewed, out=out), lambda: grouped_mm(a, b, even, out=out), repeats(run), warmup=2
    )


def wgrad_share(format: str, accumulate: bool, run: Run) -> float:
    """Into BF16, or added to FP32."""
    rows, experts = rows_of(run), 64
    offs = balanced(rows, experts)
    a, b = torch.randn(rows, OUTPUTS).bfloat16(), torch.randn(rows, LENGTH).bfloat16()
    if format != "bf16":
        a, b = (quantize(t, format, "column", offs=offs) for t in (a, b))
    out = torch.zeros(experts, OUTPUTS, LENGTH, dtype=torch.float32 if accumulate else torch.bfloat16)
    call = partial(grouped_mm_wgrad, a, b, offs, accumulate=accumulate, out=out)
    return share(call, flops(rows), peak(flops(rows)), repeats(run))


def _bar(name: str, bound: float, unit: str, measure) -> Bar:
    return Bar(name, ">=", bound, unit, measure, kind="ratio")


BARS = [
    *(
        bar
        for experts, (of_peak, over_torch) in TARGETS.items()
        for bar in (
            _bar(f"grouped_mm mxfp8, E {experts}", of_peak, PEAK, partial(grouped_mm_share, "mxfp8", experts)),
            _bar(f"grouped_mm mxfp8, E {experts}: over torch", over_torch, "x", partial(grouped_mm_over_torch, "mxfp8", experts)),
            _bar(f"grouped_mm nvfp4, E {experts}: over our mxfp8", 0.9, "x", partial(nvfp4_over_mxfp8, experts)),
        )
    ),
    *(
        _bar(f"grouped_mm_wgrad {format}, E 64, {kind}", bound, PEAK, partial(wgrad_share, format, accumulate))
        for format in ("bf16", "mxfp8")
        for kind, accumulate, bound in (("BF16 out", False, 0.75), ("added to FP32", True, 0.65))
    ),
    *(
        _bar(f"grouped_mm {format}, E 64, Zipf 1.2: over balanced", 0.85, "x", partial(skewed_over_balanced, format))
        for format in ("bf16", "mxfp8")
    ),
]
