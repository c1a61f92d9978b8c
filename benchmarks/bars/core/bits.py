"""Quantized bytes: the host backend on every instruction set against the reference, and the MXFP8 of the host against torchao's.

Every number is a count of bytes that differ. Inputs are half FP32 and half BF16, in chunks of random shapes with tails; see
`chunk`. 10 million of them per format and option, counted once, each seen by the row and, where there is one, the column copy.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.bars.harness import Bar, Run
from mxmoe.formats import FORMATS
from tests.helpers import Backend, backends_for, boundary_inputs, differences, scales_of

INPUTS = 10_000_000  # per format and option
CHUNK = 2**19  # inputs; less in quick runs, which need the variety of chunks as well
SEED = 0x5EED

OPTIONS: dict[str, dict] = {  # what `quantize` is called with, and on which formats
    "rceil": {},
    "floor": dict(scale_mode="floor"),
    "row": dict(scope="row"),
    "tensor": dict(scope="tensor"),
    "group": dict(scope="group"),
    "stochastic": dict(seed=SEED),
    "hadamard": dict(hadamard=True),
    "four_six": dict(four_six=True),
    "block_2d": dict(block_2d=True),
}
MX = ("rceil", "floor", "stochastic", "hadamard")
CELLS = [
    *itertools.product(("mxfp8", "mxfp8_e5m2", "mxfp4"), MX),
    ("mxfp8", "block_2d"),
    *(("nvfp4", option) for option in OPTIONS if option not in ("rceil", "floor")),
]


def activations(rows: int, length: int, seed: int, dtype: torch.dtype) -> Tensor:
    """What a model produces: normal numbers of one scale, some features and a few single values much larger; half of the chunks on
    a coarse grid, so that ties are common. One scale, because a global scale of a whole chunk must not hide most of it."""
    g = torch.Generator().manual_seed(seed)
    features = torch.where(torch.rand(length, generator=g) < 0.02, 30.0, 1.0)
    outliers = torch.where(torch.rand(rows, length, generator=g) < 1e-3, 100.0, 1.0)
    x = torch.randn(rows, length, generator=g) * features * outliers
    if seed % 2:
        x = torch.round(x * 8) / 8
    return (x * 2.0 ** int(torch.randint(-20, 20, (1,), generator=g))).to(dtype)


def chunk(index: int, inputs: int = CHUNK) -> Tensor:
    """The index-th chunk: boundary values (every second with NaN and Inf) and activations in turn, FP32 and BF16, 16-divisible
    shapes (as hadamard needs) with tails of blocks of 32."""
    g = torch.Generator().manual_seed(index)
    length = 16 * int(torch.randint(2, 80, (1,), generator=g))
    rows = max(16, inputs // length // 16 * 16)
    dtype = torch.float32 if index // 2 % 2 else torch.bfloat16
    if index % 2:
        return activations(rows, length, index // 4, dtype)
    return boundary_inputs(rows, length, index, dtype, finite=index // 4 % 2 == 0)


def chunk_size(inputs: int) -> int:
    return min(CHUNK, -(-inputs // 16))


def groups_of(rows: int, index: int) -> Tensor:
    """Random ends of up to 9 groups, multiples of 16, some empty; a few rows may be left over."""
    g = torch.Generator().manual_seed(index)
    ends = torch.randint(0, rows // 16 + 1, (int(torch.randint(1, 10, (1,), generator=g)),), generator=g)
    return (16 * ends).sort().values.int()


def calls(format: str, option: str, inputs: int) -> Iterator[tuple[Tensor, dict]]:
    """(x, keywords of `Backend.quantize`) until there were `inputs` inputs: rows with and without groups, stacked matrices for
    block_2d, and row, column or both copies where the scope has them."""
    done, index = 0, 0
    while done < inputs:
        x = chunk(index, chunk_size(inputs))
        done += x.numel()
        keywords = dict(OPTIONS[option])
        nvfp4 = FORMATS[format].has_global_scale
        if option == "block_2d":
            x = x.unflatten(0, (2, x.shape[0] // 2)) if index % 3 else x
            keywords["scope"] = ("group" if x.ndim == 3 else "tensor") if nvfp4 else "row"
        elif option == "group" or (nvfp4 and option in ("stochastic", "hadamard", "four_six") and index % 3 == 1):
            keywords |= dict(scope="group", offs=groups_of(x.shape[0], index))
        elif index % 3:
            keywords["offs"] = groups_of(x.shape[0], index)
        per_row = nvfp4 and keywords.get("scope", "row") == "row"
        keywords["axis"] = "row" if per_row else ("both", "column", "both", "row")[index % 4]
        yield x, keywords
        index += 1


def host_differences(format: str, option: str, run: Run) -> float:
    """Bytes by which any host ISA differs from the reference."""
    reference, *hosts = backends_for("quantize")
    different = 0
    inputs = run.count(INPUTS)
    for x, keywords in run.steps(calls(format, option, inputs), total=-(-inputs // chunk_size(inputs))):
        expected = _copies(reference, x, format, keywords)
        for host in hosts:
            got = _copies(host, x, format, keywords)
            different += sum(differences(a, b) for a, b in zip(expected, got, strict=True))
    return different


def _copies(backend: Backend, x: Tensor, format: str, keywords: dict):
    made = backend.quantize(x, format, **keywords)
    return made if isinstance(made, tuple) else (made,)


def torchao_differences(mode: str, run: Run) -> float:
    """Bytes by which MXFP8 of any host ISA differs from torchao's `to_mx`, over finite blocks with scale byte >= 1.

    Not counted: FP32 blocks whose torchao scale breaks torchao's own rule. It computes ceil(log2(amax / 448)) in FP32, where the
    logarithm of a number just above a power of two is rounded down to an integer, and the largest element then saturates.
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    inputs = run.count(INPUTS)
    different = 0
    for index in run.steps(range(-(-inputs // chunk_size(inputs)))):
        x = chunk(index, chunk_size(inputs))
        x = torch.where(x.isfinite(), x, 1.0)[:, : x.shape[1] // 32 * 32].contiguous()
        scales, values = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode[mode.upper()])
        scales, values = scales.view(torch.uint8), values.view(torch.uint8)
        counted = scales >= 1
        if mode == "rceil":
            amax = x.unflatten(1, (-1, 32)).abs().amax(2).double()
            counted &= amax <= 448 * torch.exp2(scales.double() - 127)
        for host in backends_for("quantize")[1:]:
            t = host.quantize(x, "mxfp8", scale_mode=mode)
            wrong = (t.values.view(torch.uint8) != values).unflatten(1, (-1, 32)).sum(2) + (scales_of(t) != scales)
            different += int(wrong[counted].sum())
    return different


BARS = [
    *(Bar(f"bytes {f} {o}: host = reference", "<=", 0, "different bytes", partial(host_differences, f, o)) for f, o in CELLS),
    *(
        Bar(f"bytes mxfp8 {mode}: host = torchao to_mx", "<=", 0, "different bytes", partial(torchao_differences, mode))
        for mode in ("rceil", "floor")
    ),
]
