"""Cases for the GPU kernels under the interpreter: each makes its inputs, runs a kernel and asserts its result."""

import torch
from torch import Tensor

from mxmoe.backends.interpreter import running
from mxmoe.backends.interpreter.quantize import run as run_quantize
from mxmoe.formats import QuantizeOptions
from tests.gemm_cases import Problem, assert_within_bound, operand, products
from tests.helpers import Backend, boundary_inputs, contract_copy, differences, empty_copy, poisoned

REFERENCE, INTERPRETER = Backend("reference"), Backend("interpreter")


def ends(*sizes: int) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def check_quantize(x: Tensor, format: str, axis: str = "both", offs: Tensor | None = None, scale_mode: str = "rceil"):
    """Every byte of values and plain scales is the reference's."""
    want, got = (b.quantize(x, format, axis, offs=offs, scale_mode=scale_mode) for b in (REFERENCE, INTERPRETER))
    for g, w in zip(*((t if axis == "both" else (t,)) for t in (got, want)), strict=True):
        assert differences(g, w) == 0


def check_quantize_blocked(x: Tensor, format: str, axis: str = "both", offs: Tensor | None = None):
    """The kernel's own blocked scales are those that swizzle_scales makes of the plain ones."""
    axes = ("row", "column") if axis == "both" else (axis,)
    want = {a: REFERENCE.quantize(x, format, a, offs=offs) for a in axes}
    got = {a: empty_copy(x, format, a, offs, "row") for a in axes}
    blocked = {a: poisoned(REFERENCE.swizzle(want[a]).shape, torch.uint8) for a in axes}
    copies = []
    for a in ("row", "column"):
        values, _, global_scale = contract_copy(got.get(a)) or (None, None, None)
        copies.append(None if values is None else (values, blocked[a], global_scale))
    batched = x if x.ndim == 3 else x[None]
    run_quantize(batched, offs, format, QuantizeOptions(), *copies, blocked=True)
    for a in axes:
        assert torch.equal(got[a].values.view(torch.uint8), want[a].values.view(torch.uint8)), a
        assert torch.equal(blocked[a], REFERENCE.swizzle(want[a])), a
        if want[a].global_scale is not None:
            assert torch.equal(got[a].global_scale.view(torch.int32), want[a].global_scale.view(torch.int32))


def check_grouped_mm(p: Problem, format: str, dtype=torch.bfloat16, bias: bool = False):
    """Within the bound of FP64 of the same operand bytes; rows past the last group are zero."""
    g = torch.Generator().manual_seed(0)
    a = operand(torch.randn(p.rows, p.contraction, generator=g), format)
    b = operand(torch.randn(len(p.sizes), p.outputs, p.contraction, generator=g), format)
    bias_EO = torch.randn(len(p.sizes), p.outputs, generator=g) if bias else None
    out = poisoned((p.rows, p.outputs), dtype)
    INTERPRETER.run("grouped_mm", a, b, p.offs, bias_EO, out)
    y, size = products(a, b, p.offs, p.rows)
    if bias:
        added = bias_EO.double().repeat_interleave(torch.tensor(p.sizes), dim=0)
        y[: len(added)] += added
        size[: len(added)] += added.abs()
    assert_within_bound(out, y, size, p.contraction + 1)
    assert not out[p.rows - p.past :].any()


def quantize_case():
    check_quantize_blocked(boundary_inputs(200, 160, 3, torch.bfloat16), "mxfp8", offs=ends(0, 130, 1, 40))


def quantize_nvfp4_case():
    check_quantize_blocked(boundary_inputs(50, 300, 3, torch.bfloat16, finite=False), "nvfp4", "row", ends(0, 30, 1, 10))


def quantize_nvfp4_plain_case():
    check_quantize(boundary_inputs(9, 83, 3, torch.float32, finite=False), "nvfp4", "row", ends(5, 0, 3))


def quantize_plain_case():
    check_quantize(boundary_inputs(150, 130, 3, torch.float32), "mxfp8", offs=ends(130, 0, 3))


def grouped_mm_case(format: str, arch: str = "sm_100"):
    def case():
        with running(arch=arch):
            check_grouped_mm(Problem((130, 0, 1, 20), 136, 300, past=9), format)

    return case
