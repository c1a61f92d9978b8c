"""quantize, dequantize, swizzle_scales: bytes read and written per second, beside torchao's cast."""

import pytest
import torch

from benchmarks import peers
from benchmarks.cases import CASES
from benchmarks.conftest import Provider
from mxmoe import dequantize, quantize, swizzle_scales
from mxmoe.layout import offs_from_sizes

FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")
compiled_torchao = torch.compile(peers.torchao_mxfp8, dynamic=False)
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def rows_of(case) -> torch.Tensor:
    return torch.randn(case.rows, case.dim).bfloat16()


def nbytes(copies) -> int:
    return sum(copy.nbytes for copy in (copies if isinstance(copies, tuple) else (copies,)))


@cases
def test_quantize_row(compare, case):
    x = rows_of(case)
    providers = {}
    for format in FORMATS:
        out = quantize(x, format)
        providers[f"host {format}"] = Provider(lambda f=format, o=out: quantize(x, f, out=o), True, x.nbytes + out.nbytes)
    size = x.nbytes + quantize(x, "mxfp8").nbytes
    providers["host mxfp8, allocating"] = Provider(lambda: quantize(x, "mxfp8"), work=size)
    providers["torchao mxfp8, compiled"] = Provider(lambda: compiled_torchao(x), work=size)
    providers["torchao mxfp8, eager"] = Provider(lambda: peers.torchao_mxfp8(x), work=size)
    compare("quantize (row copy)", f"{case.name}: BF16 [{case.rows}, {case.dim}]", providers, bytes=size)


@cases
def test_quantize_both(compare, case):
    """Both copies of routed rows in one pass, beside two passes and torchao's two."""
    x = rows_of(case)
    offs = offs_from_sizes(torch.full((case.num_experts,), case.rows // case.num_experts))
    both, row, column = (quantize(x, "mxfp8", axis, offs=offs) for axis in ("both", "row", "column"))
    turned = x.T.contiguous()
    providers = {
        "host mxfp8, one pass": Provider(lambda: quantize(x, "mxfp8", "both", offs=offs, out=both), True),
        "host mxfp8, two passes": Provider(
            lambda: (quantize(x, "mxfp8", "row", offs=offs, out=row), quantize(x, "mxfp8", "column", offs=offs, out=column)), True
        ),
        "torchao mxfp8, compiled, turned before": lambda: (compiled_torchao(x), compiled_torchao(turned)),
    }
    shape = f"{case.name}: BF16 [{case.rows}, {case.dim}], {case.num_experts} groups"
    compare("quantize (row and column copies)", shape, providers, bytes=x.nbytes + nbytes(both))


@cases
def test_quantize_weights(compare, case):
    """Row and column copies of the stacked weights, once per optimizer step."""
    w = torch.randn(case.num_experts, 2 * case.expert_dim, case.dim).bfloat16()
    both = quantize(w, "mxfp8", "both")
    nvfp4 = quantize(w, "nvfp4")
    providers = {
        "host mxfp8, row and column": Provider(lambda: quantize(w, "mxfp8", "both", out=both), True, w.nbytes + nbytes(both)),
        "host nvfp4, row": Provider(lambda: quantize(w, "nvfp4", out=nvfp4), True, w.nbytes + nvfp4.nbytes),
    }
    compare("quantize (weights)", f"{case.name}: BF16 {list(w.shape)}", providers, bytes=w.nbytes)


@cases
def test_dequantize(compare, case):
    x = rows_of(case)
    out = torch.empty_like(x)
    providers = {}
    for format in FORMATS:
        t = quantize(x, format)
        providers[f"host {format}"] = Provider(lambda t=t: dequantize(t, torch.bfloat16, out=out), True, x.nbytes + t.nbytes)
    t = quantize(x, "mxfp8")
    scales = t.scales.view(torch.uint8).int().sub(127).float().exp2().bfloat16().unsqueeze(-1)
    blocks, target = t.values.unflatten(1, (-1, 32)), out.unflatten(1, (-1, 32))
    providers["torch mxfp8"] = Provider(lambda: torch.mul(blocks.bfloat16(), scales, out=target), True, x.nbytes + t.nbytes)
    compare("dequantize (to BF16)", f"{case.name}: [{case.rows}, {case.dim}]", providers, bytes=x.nbytes)


@cases
def test_swizzle_scales(compare, case):
    t = quantize(rows_of(case), "mxfp8")
    lines, blocks = t.scales.shape
    plain = t.scales.view(torch.uint8)

    def torch_swizzle():  # needs multiples of 128 and 4, which these shapes are
        tiles = plain.view(lines // 128, 4, 32, blocks // 4, 4)
        return tiles.permute(0, 3, 2, 1, 4).reshape(-1)

    assert torch.equal(torch_swizzle(), swizzle_scales(t).scales.view(torch.uint8))
    providers = {"host": lambda: swizzle_scales(t), "torch": torch_swizzle}
    compare("swizzle_scales", f"{case.name}: [{lines}, {blocks}]", providers, bytes=2 * plain.nbytes)
