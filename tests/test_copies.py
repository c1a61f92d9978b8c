"""Verbs that quantize what they compute (swiglu, swiglu_backward, permute, unpermute_backward with `format`): the same bytes as
quantizing their result, on every instruction set."""

import pytest
import torch

from mxmoe import Routing, ops
from mxmoe.backends import host
from mxmoe.recipes import SwiGLU
from tests.helpers import FORMAT_NAMES, backends_for, boundary_inputs, differences

HOST = backends_for("swiglu")[1:]
ACTIVATIONS = (SwiGLU(), SwiGLU(alpha=1.702, limit=7.0, offset=1.0))


@pytest.fixture(params=HOST, ids=str, autouse=True)
def isa(request):
    with host.use_isa(request.param.isa):
        yield


def check(got, rows, format, axis, offs, **options):
    """Copies equal to the reference's of `rows`."""
    axes = ("row", "column") if axis == "both" else (axis,)
    for copy, each in zip(got if axis == "both" else (got,), axes, strict=True):
        scope = "row" if each == "row" else "group" if offs is not None else "tensor"
        want = ops.quantize(rows, format, each, offs=offs, scope=scope, backend="reference", **options)
        assert (copy.format, copy.axis, copy.shape, copy.offs is None) == (format, each, want.shape, offs is None)
        assert differences(copy, want) == 0, (format, axis, rows.shape)


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_swiglu_equals_its_composition(format, gate_up):
    for activation, (rows, width, ends), dtype in (
        (ACTIVATIONS[0], (300, 64, [0, 20, 150, 150, 280]), torch.bfloat16),
        (ACTIVATIONS[1], (70, 37, None), torch.bfloat16),
        (ACTIVATIONS[0], (40, 1090, [40]), torch.float32),
        (ACTIVATIONS[1], (0, 32, None), torch.float16),
    ):
        offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
        h = boundary_inputs(rows, 2 * width, 3, dtype, finite=False)
        da = torch.randn(rows, width).to(dtype)
        both = "both" if format != "nvfp4" or offs is not None else "row"
        for axis in {both, "row"} if rows != 40 else {both}:
            options = dict(gate_up=gate_up, offs=offs, activation=activation)
            check(ops.swiglu(h, format=format, axis=axis, **options), ops.swiglu(h, **options), format, axis, offs)
            dh = ops.swiglu_backward(da, h, **options)
            check(ops.swiglu_backward(da, h, format=format, axis=axis, **options), dh, format, axis, offs)


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_permuted_rows_equal_their_composition(format, dtype):
    ids = torch.randint(-1, 5, (90, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    routing = Routing.from_ids(ids, torch.randn(90, 3), 5)
    x, dy = boundary_inputs(90, 600, 4, dtype, finite=False), torch.randn(90, 70).to(dtype)
    y = torch.randn(270, 70).to(dtype)
    for axis in ("row", "both"):
        check(ops.permute(x, routing, format=format, axis=axis), ops.permute(x, routing), format, axis, routing.offs)
        options = dict(rows_dtype=torch.bfloat16)
        rows, dots = ops.unpermute_backward(dy, routing, routing.weights, y, **options)
        got, same_dots = ops.unpermute_backward(dy, routing, routing.weights, y, format=format, axis=axis, **options)
        check(got, rows, format, axis, routing.offs)
        assert torch.equal(dots, same_dots)
        assert ops.unpermute_backward(dy, routing, format=format, axis=axis)[1] is None


def test_options_and_outputs():
    h, offs = torch.randn(200, 128).bfloat16(), torch.tensor([90, 200], dtype=torch.int32)
    a = ops.swiglu(h)
    for options in ({"scale_mode": "floor"}, {"seed": 5}, {"hadamard": True}):
        row = ops.swiglu(h, format="mxfp8", **options)
        check(row, a, "mxfp8", "row", None, **options)
    out = ops.quantize(torch.zeros(200, 64).bfloat16(), "mxfp8", "both", offs=offs)
    assert ops.swiglu(h, format="mxfp8", axis="both", offs=offs, out=out)[1] is out[1]
    check(out, a, "mxfp8", "both", offs)
    with pytest.raises(ValueError, match="need a format"):
        ops.swiglu(h, seed=3)
    with pytest.raises(ValueError, match="axis"):
        ops.swiglu(h, format="mxfp8", axis="rows")
