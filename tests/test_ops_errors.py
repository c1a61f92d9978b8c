"""Every verb refuses bad arguments with argument, expected and got, and never crashes on them."""

import pytest
import torch

import mxmoe
from mxmoe import MXTensor, ops, quantize

BACKENDS = ["reference", "host", "interpreter"]


def rows(m=8, c=32, dtype=torch.float32):
    return torch.randn(m, c).to(dtype)


def offs(*ends):
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "int4"}, ValueError, "format must be one of 'mxfp8'.*got 'int4'"),
        ({"axis": "diagonal"}, ValueError, "axis must be one of 'row', 'column', 'both', got 'diagonal'"),
        ({"scale_mode": "ceil"}, ValueError, "scale_mode must be one of 'rceil', 'floor', got 'ceil'"),
        ({"scale_layout": "tiled"}, ValueError, "scale_layout must be one of"),
        ({"format": "nvfp4", "scope": "block"}, ValueError, "scope must be one of"),
        ({"format": "nvfp4", "axis": "column"}, ValueError, "scope='row' has no column copy"),
        ({"format": "nvfp4", "scope": "group"}, ValueError, "scope='group' needs offs or a 3-D x"),
        ({"format": "nvfp4", "block_2d": True}, ValueError, "block_2d needs scope 'tensor' or 'group'"),
        ({"four_six": True}, ValueError, "four_six applies to nvfp4 only"),
        ({"format": "nvfp4", "four_six": True, "hadamard": True}, ValueError, "four_six and hadamard cannot be combined"),
        ({"format": "mxfp4", "block_2d": True}, ValueError, "block_2d applies to mxfp8 and nvfp4, got format 'mxfp4'"),
        ({"hadamard": True, "x": rows(8, 24)}, ValueError, r"multiple of 16, got \(24,\)"),
        ({"hadamard": True, "axis": "column", "x": rows(32, 8), "offs": offs(8, 32)}, ValueError, "every group"),
        ({"seed": -1}, ValueError, r"seed must be in \[0, 2\*\*63\), got -1"),
        ({"x": torch.zeros(4)}, ValueError, r"x must have 2 or 3 dimensions, got shape \(4,\)"),
        ({"x": torch.zeros(4, 4, dtype=torch.float64)}, TypeError, "x must be float32 or bfloat16 or float16, got float64"),
        ({"x": torch.zeros(2, 4, 4), "offs": offs(1)}, ValueError, "x must have 2 dimensions when offs is given"),
        ({"offs": torch.tensor([8.0])}, TypeError, "offs must be int32, got float32"),
        ({"offs": torch.tensor([8])}, TypeError, "offs must be int32, got int64"),
        ({"offs": torch.zeros(0, dtype=torch.int32)}, ValueError, "offs must have at least one group"),
        ({"out": 3}, TypeError, "out must be MXTensor, got int"),
    ],
)  # fmt: skip
def test_quantize(options, error, message):
    options = {"x": rows(), "format": "mxfp8", **options}
    with pytest.raises(error, match=message):
        quantize(options.pop("x"), **options)


BAD_OFFS = [
    ([4, 2, 8], r"offs\[1\] must be >= offs\[0\] = 4, got 2"),
    ([-1, 4, 8], r"offs\[0\] must be >= 0, got -1"),
    ([2, 4, 9], r"offs must end within the 8 rows, got offs\[-1\] = 9"),
    ([-(2**31), 4, 8], r"offs\[0\] must be >= 0, got -2147483648"),  # what NaN becomes as an integer
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("ends", "message"), BAD_OFFS)
def test_g07_offsets(ends, message, backend):
    x, w = rows(), torch.randn(3, 16, 32)
    for call in (
        lambda o: mxmoe.grouped_mm(x, w, o, backend=backend),
        lambda o: mxmoe.grouped_mm_wgrad(x, x, o, backend=backend),
        lambda o: quantize(x, "mxfp8", "both", offs=o, backend=backend),
        lambda o: mxmoe.swiglu(x, offs=o, backend=backend),
        lambda o: ops.swiglu_backward(rows(8, 16), x, offs=o, backend=backend),
    ):
        with pytest.raises(ValueError, match=message):
            call(offs(*ends))


@pytest.mark.parametrize(
    ("a", "b", "o", "options", "error", "message"),
    [
        (rows(8, 33), torch.zeros(2, 4, 32), offs(3, 8), {}, ValueError, "b must contract over a's 33 columns, got 32"),
        (rows(), torch.zeros(3, 4, 32), offs(3, 8), {}, ValueError, r"one entry per group \(3\), got 2"),
        (rows(), torch.zeros(2, 4, 32), offs(3, 8), {"bias": torch.zeros(2, 5)}, ValueError, r"bias must have shape \(2, 4\)"),
        (rows(), torch.zeros(2, 4, 32).bfloat16(), offs(3, 8), {}, TypeError, "same dtype, got fp32 and bf16"),
        (rows(), torch.zeros(2, 4, 32), offs(3, 8), {"out": torch.zeros(8, 5)}, ValueError, r"out must have shape \(8, 4\)"),
        (rows(), torch.zeros(2, 4, 32), offs(3, 8), {"out": torch.zeros(4, 8).t()}, ValueError, "out must be contiguous"),
        (rows(), torch.zeros(2, 4, 32), offs(3, 8), {"out_dtype": torch.int32}, ValueError, "out_dtype must be one of"),
        (rows(), torch.zeros(4, 32), offs(8), {}, ValueError, "b must have 3 dimensions"),
        (rows(), torch.zeros(2, 4, 32, device="meta"), offs(3, 8), {}, ValueError, "same device, got cpu and meta"),
    ],
)  # fmt: skip
def test_grouped_mm(a, b, o, options, error, message):
    with pytest.raises(error, match=message):
        mxmoe.grouped_mm(a, b, o, **options)


def test_grouped_mm_quantized_operands():
    x, w = rows(), torch.randn(2, 4, 32)
    column = quantize(x, "mxfp8", "column", offs=offs(3, 8))
    with pytest.raises(ValueError, match="a must be a row copy"):
        mxmoe.grouped_mm(column, quantize(w, "mxfp8"), offs(3, 8))
    with pytest.raises(ValueError, match="2-D column copy quantized with offs"):
        mxmoe.grouped_mm_wgrad(quantize(x, "mxfp8"), column, offs(3, 8))
    with pytest.raises(ValueError, match="both or neither"):
        mxmoe.grouped_mm_wgrad(x, column, offs(3, 8))
    with pytest.raises(ValueError, match="accumulate=True needs out"):
        mxmoe.grouped_mm_wgrad(x, x, offs(3, 8), accumulate=True)


def test_rows():
    routing = mxmoe.route(torch.randn(5, 4), 2)
    with pytest.raises(ValueError, match="x must have the routing's 5 tokens, got 6"):
        mxmoe.permute(rows(6), routing)
    with pytest.raises(ValueError, match=r"y must have shape \(10, 32\), got \(9, 32\)"):
        mxmoe.unpermute(rows(9), routing)
    with pytest.raises(ValueError, match=r"weights must have shape \(5, 2\), got \(5, 3\)"):
        mxmoe.unpermute(rows(10), routing, torch.ones(5, 3))
    with pytest.raises(ValueError, match=r"dy must have shape \(5, 32\)"):
        ops.unpermute_backward(rows(4), routing)
    with pytest.raises(ValueError, match="even number of columns"):
        mxmoe.swiglu(rows(3, 7))
    with pytest.raises(ValueError, match="gate_up must be one of"):
        mxmoe.swiglu(rows(), gate_up="up_gate")
    with pytest.raises(TypeError, match="da must be float32, got bfloat16"):
        ops.swiglu_backward(rows(8, 16).bfloat16(), rows())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_k": 5}, ValueError, r"top_k must be between 1 and the number of experts \(4\), got 5"),
        ({"top_k": 0}, ValueError, "got 0"),
        ({"num_groups": 3}, ValueError, r"num_groups must divide the number of experts \(4\), got 3"),
        ({"num_groups": 2, "groups_kept": 3}, ValueError, "groups_kept must be between 1 and num_groups"),
        ({"num_groups": 4, "groups_kept": 1}, ValueError, "experts of the kept groups"),
        ({"bias": torch.zeros(5)}, ValueError, r"bias must have shape \(4,\), got \(5,\)"),
        ({"replay": torch.zeros(3, 2)}, TypeError, "replay must be int32 or int64, got float32"),
        ({"logits": torch.zeros(3, 4, 1)}, ValueError, "logits must have 2 dimensions"),
        ({"capacity_factor": 1.25}, ValueError, "dropless"),
    ],
)  # fmt: skip
def test_route(options, error, message):
    options = {"logits": torch.randn(3, 4), "top_k": 2, **options}
    with pytest.raises(error, match=message):
        mxmoe.route(options.pop("logits"), options.pop("top_k"), **options)


def test_dequantize_and_layouts():
    t = quantize(rows(), "mxfp8")
    with pytest.raises(TypeError, match="t must be an MXTensor, got Tensor"):
        mxmoe.dequantize(rows())
    with pytest.raises(ValueError, match="out_dtype must be one of"):
        mxmoe.dequantize(t, torch.float64)
    with pytest.raises(ValueError, match=r"out must have shape \(8, 32\)"):
        mxmoe.dequantize(t, out=torch.zeros(8, 31))
    with pytest.raises(TypeError, match="t must be an MXTensor"):
        mxmoe.swizzle_scales(rows())
    assert isinstance(mxmoe.swizzle_scales(t), MXTensor)


def test_an_unavailable_device_is_named():
    with pytest.raises(NotImplementedError, match="no backend for device 'meta'"):
        quantize(torch.zeros(4, 32, device="meta"), "mxfp8")


def test_strided_offsets_are_read_as_they_are():
    x, w = rows(), torch.randn(3, 16, 32)
    plain, strided = offs(2, 5, 8), offs(2, 99, 5, 99, 8, 99)[::2]
    assert torch.equal(mxmoe.grouped_mm(x, w, strided), mxmoe.grouped_mm(x, w, plain))
    assert torch.equal(mxmoe.grouped_mm_wgrad(x, x, strided), mxmoe.grouped_mm_wgrad(x, x, plain))
    for a, b in zip(quantize(x, "mxfp8", "both", offs=strided), quantize(x, "mxfp8", "both", offs=plain), strict=True):
        assert torch.equal(a.dequantize(), b.dequantize())
        assert torch.equal(mxmoe.swizzle_scales(a).scales.view(torch.uint8), mxmoe.swizzle_scales(b).scales.view(torch.uint8))


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_limit_of_swiglu(limit):
    with pytest.raises(ValueError, match=f"limit must be positive, or None for no clamp, got {limit}"):
        mxmoe.SwiGLU(limit=limit)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", ["w13", "w2", "routing"])
def test_parts_on_another_device_are_refused(what, backend):
    """Whose memory a kernel would read at an address of its own; a dispatcher that sees a meta tensor calls no kernel at all."""
    x, ids, weights = rows(8, 32), torch.zeros(8, 1, dtype=torch.int32), torch.ones(8, 1)
    w13, w2 = quantize(torch.ones(2, 64, 32), "mxfp8"), quantize(torch.ones(2, 32, 32), "mxfp8")
    routing = mxmoe.Routing.from_ids(ids, weights, 2).to("meta")
    calls = {
        "w13": [lambda: ops.moe_decode(x, ids, weights, w13.to("meta"), w2, backend=backend)],
        "w2": [lambda: ops.moe_decode(x, ids, weights, w13, w2.to("meta"), backend=backend)],
        "routing": [
            lambda: mxmoe.permute(x, routing, backend=backend),
            lambda: mxmoe.unpermute(x, routing, backend=backend),
            lambda: ops.unpermute_backward(x, routing, backend=backend),
            lambda: ops.route_backward(rows(8, 2), routing, weights, backend=backend),
        ],
    }
    for call in calls[what]:
        with pytest.raises(ValueError, match=f"{what} must be on cpu like the other arguments, got meta"):
            call()
