"""The cuda backend where there is no GPU: what it says, that it traces, and that its Python never asks the device for a value."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mxmoe
from mxmoe import backends, info, ops
from mxmoe.backends import cuda
from mxmoe.backends.device import SUPPORTS, Launcher, verbs
from mxmoe.formats import FORMATS, QuantizeOptions
from mxmoe.recipes import SwiGLU

E, O, C, R = 3, 64, 128, 40
HIGH_PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def random(*shape, dtype=torch.bfloat16, device="cuda"):
    return torch.randn(*shape, device=device).to(dtype)


def offs(device="cuda"):
    return torch.zeros(E, dtype=torch.int32, device=device)


def launched(arch: str):
    """The verbs over a launcher that lists the kernels it is asked for."""
    kernels = []

    def launch(name, *args):
        assert all(t.device.type == "meta" for t in args if isinstance(t, torch.Tensor)), name
        kernels.append(name)

    return verbs(Launcher("cuda", lambda device: arch, launch)), kernels


@pytest.mark.skipif(bool(cuda.lacks()), reason="built without the kernels for GPUs")
def test_cuda_tensors_go_to_the_cuda_backend():
    assert backends.resolve("auto", "cuda") == "cuda"
    assert backends.get("cuda").SUPPORTS == backends.get("interpreter").SUPPORTS == SUPPORTS


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90"), ((10, 0), "sm_100"), ((10, 3), "sm_100")])
def test_devices_with_kernels(capability, arch):
    assert cuda.arch_of("a GPU", capability) == arch


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (11, 0), (12, 0)])
def test_other_devices_are_told_what_is_supported(capability):
    text = r"needs a device of compute capability 9\.0 \(Hopper.*10\.3 \(Blackwell Ultra.*, got an old GPU with {}\.{}"
    with pytest.raises(NotImplementedError, match=text.format(*capability)):
        cuda.arch_of("an old GPU", capability)


def test_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match="backend='cuda' needs tensors on a CUDA device, got cpu"):
        mxmoe.quantize(torch.ones(4, 32), "mxfp8", backend="cuda")


def test_without_the_kernels_a_verb_says_what_to_build(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mxmoe._cuda", None)
    cuda.module.cache_clear()
    with pytest.raises(ImportError, match=r"the cuda backend needs mxmoe\._cuda .* MXMOE_CUDA=ON"):
        cuda.module()
    assert "needs mxmoe._cuda" in info.kernels()
    cuda.module.cache_clear()


def test_info_names_the_kernels():
    assert "cuda     " in info.report()


def test_verbs_compile_over_fakes():
    def step(x, w, offs, h):
        a, b = ops.quantize(x, "mxfp8"), ops.quantize(w, "mxfp8")
        y = ops.grouped_mm(a, b, offs)
        hidden = ops.swiglu(y, offs=offs, format="mxfp8", axis="both")[1]
        grad = ops.grouped_mm_wgrad(hidden, ops.quantize(x, "mxfp8", "column", offs=offs), offs)
        return y, grad, ops.swiglu_backward(h, y, offs=offs)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with FakeTensorMode():
        y, grad, dh = compiled(random(40, C), random(E, O, C), offs(), random(40, O // 2))
    assert y.device.type == grad.device.type == dh.device.type == "cuda"
    assert (y.shape, grad.shape, dh.shape) == ((40, O), (E, O // 2, C), (40, O))


# What the verbs do before their kernels, on tensors without values: to read one is an error


def empty(*shape, dtype=torch.uint8):
    return torch.empty(shape, dtype=dtype, device="meta")


def half(*shape, dtype=torch.bfloat16):
    return empty(*shape, dtype=dtype)


def operand(*lines_and_contraction, format):
    *lines, contraction = lines_and_contraction
    if format in HIGH_PRECISION:
        return half(*lines, contraction, dtype=HIGH_PRECISION[format]), None, None, format
    fmt = FORMATS[format]
    values = empty(*lines, contraction * fmt.bits // 8)
    global_scale = empty(*lines, dtype=torch.float32) if fmt.has_global_scale else None
    return values, empty(*lines, contraction // fmt.block), global_scale, format


def ints(*shape):
    return empty(*shape, dtype=torch.int32)


def floats(*shape):
    return empty(*shape, dtype=torch.float32)


def copies_of(format: str):
    """(row copy, column copy or None) of a matrix (R, C), in groups."""
    if format == "nvfp4":
        return (empty(1, R, C // 2), empty(1, R, C // 16), floats(1, R)), None
    if format == "mxfp4":
        return (empty(1, R, C // 2), empty(1, R, C // 32), None), None
    return (empty(1, R, C), empty(1, R, C // 32), None), (empty(1, 512, C), empty(1, C, 16), None)


def gemm_calls(format):
    a, b = operand(R, C, format=format), operand(E, O, C, format=format)
    return [(a, b, offs("meta"), bias, half(R, O)) for bias in (None, half(E, O))]


def wgrad_calls(format):
    padded = format in FORMATS
    a, b = (operand(lines, 512 if padded else R, format=format) for lines in (O, C))
    return [(a, b, offs("meta"), padded, True, half(E, O, C))]


def decode_calls(format):
    w13, w2 = operand(E, 2 * O, C, format=format), operand(E, C, O, format=format)
    x = half(2, C), None, None, "bf16"
    return [(x, ints(2, 2), floats(2, 2), w13, half(E, 2 * O), w2, None, SWIGLU, False, "bf16", QuantizeOptions(), half(2, C))]


SWIGLU = SwiGLU(1.702, 7.0, 1.0)
FUSED = ("mxfp8", "rceil", *copies_of("mxfp8"))
# Verb -> arguments for a format, as mxmoe/backends lists them; R rows, those past the last group included.
CALLS = {
    "quantize": lambda f: [
        (half(1, R, C), ends, f, options, *copies_of(f))
        for ends in (None, offs("meta"))
        for options in (QuantizeOptions(), QuantizeOptions(seed=3))
    ],
    "dequantize": lambda f: [(*copies_of(f)[0], offs("meta"), f, "row", "row", half(1, R, C))],
    "swizzle_scales": lambda f: [(empty(1, R, 4), empty(1, 2048), offs("meta"), "row", 32, inverse) for inverse in (False, True)],
    "route": lambda f: [
        (floats(R, 8), None, None, 2, "softmax", 1, 1, True, 1.0, None, ints(R, 2), floats(R, 2), floats(8), floats(1))
    ],
    "route_backward": lambda f: [(floats(R, 8), ints(R, 2), floats(R, 2), None, None, "softmax", True, 1.0, floats(R, 8))],
    "sort_by_expert": lambda f: [(ints(R, 2), 8, ints(8), ints(8), ints(2 * R), ints(R, 2))],
    "permute": lambda f: [(half(R // 2, C), ints(R), 2, o, offs("meta"), c) for o, c in ((half(R, C), None), (None, FUSED))],
    "unpermute": lambda f: [(half(R, C), ints(R // 2, 2), floats(R // 2, 2), half(R // 2, C))],
    "unpermute_backward": lambda f: [
        (half(R // 2, C), half(R, C), ints(R), floats(R // 2, 2), o, floats(R // 2, 2), offs("meta"), c)
        for o, c in ((half(R, C), None), (None, FUSED))
    ],
    "swiglu": lambda f: [(half(R, 2 * C), offs("meta"), SWIGLU, True, o, c) for o, c in ((half(R, C), None), (None, FUSED))],
    "swiglu_backward": lambda f: [(half(R, C), half(R, 2 * C), offs("meta"), SWIGLU, True, half(R, 2 * C), None)],
    "grouped_mm": gemm_calls,
    "grouped_mm_wgrad": wgrad_calls,
    "moe_decode": decode_calls,
}


def test_every_verb_is_called():
    assert set(CALLS) == {verb for verb, _ in SUPPORTS}


@pytest.mark.parametrize(("verb", "format"), sorted(SUPPORTS))
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_nothing_is_read_on_the_host(verb, format, arch):
    run, kernels = launched(arch)
    for args in CALLS[verb](format):
        try:
            run[verb](*args)
        except NotImplementedError as error:
            assert arch in str(error) or format in str(error)  # noqa: PT017
        else:
            assert kernels
