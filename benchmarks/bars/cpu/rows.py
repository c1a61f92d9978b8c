"""quantize, swiglu, permute, unpermute and route: the verbs that move rows, beside the copy roof, torchao and torch."""

from functools import partial

import torch
from torch import Tensor

from benchmarks import peers, timing
from benchmarks.bars.harness import Bar, Run
from benchmarks.ceilings import copy_roof, share
from mxmoe import ops, permute, quantize, route, swiglu, unpermute
from mxmoe.formats import MXTensor
from mxmoe.layout import offs_from_sizes

ROOF = "of the copy roof"
TORCHAO = {"mxfp8": torch.compile(peers.torchao_mxfp8, dynamic=False), "nvfp4": torch.compile(peers.torchao_nvfp4, dynamic=False)}
GROUPS = 64


def repeats(run: Run) -> int:
    return 3 if run.quick else 15


def nbytes(*tensors: Tensor | MXTensor | tuple) -> int:
    """Of tensors, MXTensors and pairs of them."""
    return sum(nbytes(*t) if isinstance(t, tuple) else t.nbytes for t in tensors)


def activations(run: Run) -> Tensor:
    return torch.randn(run.count(8192, least=128), 7168).bfloat16()


def quantize_share(format: str, axis: str, run: Run) -> float:
    x = activations(run)
    out = quantize(x, format, axis)
    work = nbytes(x, out)
    return share(lambda: quantize(x, format, axis, out=out), work, copy_roof(work), repeats(run))


def quantize_over_torchao(format: str, run: Run) -> float:
    """torchao compiled allocates its results; its NVFP4 has one scale per tensor, of which the largest value is found first."""
    x = activations(run)
    out = quantize(x, format)
    return timing.speedup(lambda: quantize(x, format, out=out), lambda: TORCHAO[format](x), 3 if run.quick else 9, warmup=2)


def both_over_two_passes(run: Run) -> float:
    x = activations(run)
    both, row, column = (quantize(x, "mxfp8", axis) for axis in ("both", "row", "column"))

    def two_passes():
        quantize(x, "mxfp8", "row", out=row)
        quantize(x, "mxfp8", "column", out=column)

    return timing.ratio(lambda: quantize(x, "mxfp8", "both", out=both), two_passes, repeats(run), warmup=2)


def groups_of(rows: int) -> Tensor:
    return offs_from_sizes(torch.full((GROUPS,), rows // GROUPS))


def swiglu_share(run: Run) -> float:
    h = torch.randn(run.count(16384, least=128), 4096).bfloat16()
    options = dict(format="mxfp8", axis="both", offs=groups_of(h.shape[0]))
    out = swiglu(h, **options)
    work = nbytes(h, out)
    return share(lambda: swiglu(h, **options, out=out), work, copy_roof(work), repeats(run))


def swiglu_backward_share(run: Run) -> float:
    h = torch.randn(run.count(16384, least=128), 4096).bfloat16()
    da = torch.randn(h.shape[0], 2048).bfloat16()
    options = dict(format="mxfp8", axis="both", offs=groups_of(h.shape[0]))
    out = ops.swiglu_backward(da, h, **options)
    work = nbytes(h, da, out)
    return share(lambda: ops.swiglu_backward(da, h, **options, out=out), work, copy_roof(work), repeats(run))


def routed(run: Run):
    """(routing, D): 4096 tokens to 8 of 64 experts each, 32,768 rows of width 3584."""
    return route(torch.randn(run.count(4096, least=64), 64), 8), 3584


def permute_share(run: Run) -> float:
    """A row counts as read once for every time it is written."""
    routing, width = routed(run)
    tokens, top_k = routing.ids.shape
    x, out = torch.randn(tokens, width).bfloat16(), torch.empty(tokens * top_k, width, dtype=torch.bfloat16)
    return share(lambda: permute(x, routing, out=out), 2 * out.nbytes, copy_roof(2 * out.nbytes), repeats(run))


def unpermute_share(run: Run) -> float:
    routing, width = routed(run)
    tokens, top_k = routing.ids.shape
    y, out = torch.randn(tokens * top_k, width).bfloat16(), torch.empty(tokens, width, dtype=torch.bfloat16)
    work = nbytes(y, out)
    return share(lambda: unpermute(y, routing, routing.weights, out=out), work, copy_roof(work), repeats(run))


def route_over_torch(run: Run) -> float:
    logits, bias = torch.randn(run.count(8192, least=128), 384), torch.randn(384) / 16
    ours, theirs = route(logits, 8, score="sigmoid", bias=bias), peers.torch_route(logits, bias, 8)
    assert (ours.offs - theirs[2]).abs().max() <= 8  # torch's sigmoid rounds otherwise, which a near tie may see
    call = partial(route, logits, 8, score="sigmoid", bias=bias)
    return timing.speedup(call, lambda: peers.torch_route(logits, bias, 8), repeats(run), warmup=2)


def _bar(name: str, compare: str, bound: float, unit: str, measure) -> Bar:
    return Bar(name, compare, bound, unit, measure, kind="ratio")


BARS = [
    _bar("quantize mxfp8 [8192, 7168]", ">=", 0.65, ROOF, partial(quantize_share, "mxfp8", "row")),
    _bar("quantize mxfp8 [8192, 7168]: over torchao", ">=", 8, "x compiled", partial(quantize_over_torchao, "mxfp8")),
    _bar("quantize mxfp8 row + column, one pass", ">=", 0.55, ROOF, partial(quantize_share, "mxfp8", "both")),
    _bar("quantize mxfp8 row + column, one pass: over two", "<=", 0.75, "x time", both_over_two_passes),
    _bar("quantize nvfp4 per token [8192, 7168]", ">=", 0.40, ROOF, partial(quantize_share, "nvfp4", "row")),
    _bar("quantize nvfp4 per token: over torchao", ">=", 15, "x compiled", partial(quantize_over_torchao, "nvfp4")),
    _bar("swiglu [16384, 2 x 2048] to mxfp8 copies", ">=", 0.45, ROOF, swiglu_share),
    _bar("swiglu_backward [16384, 2 x 2048] to mxfp8 copies", ">=", 0.40, ROOF, swiglu_backward_share),
    _bar("permute 32768 x 3584", ">=", 0.75, ROOF, permute_share),
    _bar("unpermute 32768 x 3584, weighted", ">=", 0.65, ROOF, unpermute_share),
    _bar("route 8192 tokens, E 384, top-8: over torch", ">=", 4, "x", route_over_torch),
]
