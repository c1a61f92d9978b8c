"""Every launch that the verbs of mxmoe/backends/triton make: the verbs are called as users call them, on small CPU tensors, for an
architecture of one's choice, and what they would launch is written down instead."""

from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import triton
from torch import Tensor

from mxmoe import Routing, ops
from mxmoe.backends.triton import kernels
from mxmoe.backends.triton.kernels.target import Target
from mxmoe.formats import FORMATS, MXTensor
from mxmoe.recipes import SwiGLU
from tests.gemm_cases import DTYPES

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.uint8: "u8",
}
OPTIONS = ("num_warps", "num_stages")
SIZES = ("COMPUTE", "BR", "BL", "BM", "BN", "BK", "BT")
FLOATS = {"*i16": "bf16", "*fp16": "fp16", "*fp32": "fp32"}
SHOWN = ("x", "h", "y", "dy", "da", "a", "b", "out")
ON = {"backend": "triton"}
ROWS, WIDTH, EXPERTS, MANY_EXPERTS = 96, 256, 4, 384


@dataclass(frozen=True)
class Launch:
    """A kernel and what decides its code: types; constants; the parameters that are multiples of 16; warps and stages."""

    kernel: triton.JITFunction
    signature: dict[str, str]
    constants: dict[str, object]
    aligned: tuple[int, ...]
    options: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel, the types of its floats, what distinguishes its code; "any": sizes that need not be multiples of 16."""
        floats = [f"{k} {FLOATS[v]}" for k, v in self.signature.items() if v in FLOATS and k in SHOWN]
        shown = [f"{k}={v}" for k, v in self.constants.items() if v is not None and v is not False and k not in SIZES]
        missing = [f"no {k}" for k, v in self.constants.items() if v is None]
        kinds = enumerate(self.signature.items())
        unaligned = [k for i, (k, v) in kinds if i not in self.aligned and v not in ("constexpr", "fp32")]
        parts = [", ".join(floats + shown + missing), *(["any " + " ".join(unaligned)] if unaligned else [])]
        return f"{self.kernel.__name__}({'; '.join(parts)})"

    @property
    def config(self) -> str:
        """Its tile and what else pick_config decides."""
        sizes = {k: self.constants[k] for k in SIZES if k in self.constants} | self.options
        return " ".join(f"{k.removeprefix('num_')} {v}" for k, v in sizes.items())


def launches(arch: str) -> list[Launch]:
    """What all calls would launch on a device of that architecture, each once."""
    found: dict[str, Launch] = {}

    def record(kernel, grid, **arguments):
        assert len(grid) <= 3
        options = {k: v for k in OPTIONS if (v := arguments.pop(k, None)) is not None}
        launch = Launch(kernel, *_typed(kernel, arguments), options)
        found.setdefault(f"{launch.name} {launch.config}", launch)

    with recorded_by(Target(arch, record, 132)):
        for call in calls():
            call()
    names = Counter(launch.name for launch in found.values())
    assert names.most_common(1)[0][1] == 1, f"two launches in one name: {names.most_common(3)}"
    return list(found.values())


@contextmanager
def recorded_by(target: Target):
    """Within, the backend runs on `target` whatever the tensors' device."""
    before = kernels.target_of
    kernels.target_of = lambda device: target
    try:
        yield
    finally:
        kernels.target_of = before


def _typed(kernel, arguments: dict) -> tuple[dict[str, str], dict[str, object], tuple[int, ...]]:
    """As Triton specialises a launch with these arguments."""
    signature, constants, aligned = {}, {}, []
    for i, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            if value.data_ptr() % 16 == 0:
                aligned.append(i)
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                aligned.append(i)
    assert not arguments, f"{kernel.__name__} has no parameters {list(arguments)}"
    return signature, constants, tuple(aligned)


def copied(x: Tensor, format: str, axis: str = "row", **options) -> MXTensor:
    return ops.quantize(x, format, axis, **options, backend="reference")


def operand(format: str, *shape: int) -> Tensor | MXTensor:
    x = torch.zeros(shape)
    return x.to(DTYPES[format]) if format in DTYPES else copied(x, format)


def columns(format: str, length: int, offs: Tensor, **options):
    """An operand of grouped_mm_wgrad."""
    x = torch.zeros(ROWS, length)
    return x.to(DTYPES[format]) if format in DTYPES else copied(x, format, "column", offs=offs, **options)


def calls() -> list[Callable[[], object]]:
    """For each kernel the formats, dtypes and options that change its code; the most ordinary call of each comes first."""
    offs = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (ROWS // EXPERTS)
    return [*quantizing(offs), *routing(), *rows(offs), *products(offs)]


def many_groups() -> Tensor:
    return torch.full((MANY_EXPERTS,), ROWS, dtype=torch.int32)


def quantizing(offs: Tensor):
    x = {dtype: torch.zeros(ROWS, WIDTH, dtype=dtype) for dtype in DTYPES.values()}
    bf16 = x[torch.bfloat16]
    for format, f in FORMATS.items():
        group = {"scope": "group"} if f.has_global_scale else {}
        yield partial(ops.quantize, bf16, format, **ON)
        yield partial(ops.quantize, bf16, format, "both", offs=offs, **group, **ON)
        yield partial(ops.dequantize, copied(bf16, format, "row", offs=offs), torch.bfloat16, **ON)
        yield partial(ops.dequantize, copied(bf16, format, "column", offs=offs, **group), torch.bfloat16, **ON)
        if format in ("mxfp8", "nvfp4"):
            yield partial(ops.quantize, bf16, format, "column", offs=offs, **group, **ON)
            yield partial(ops.quantize, bf16, format, offs=offs, **ON)
            yield partial(ops.quantize, bf16.view(2, ROWS // 2, WIDTH), format, "both", **group, **ON)
            yield partial(ops.dequantize, copied(bf16, format, "row"), torch.bfloat16, **ON)
            for scale_layout, change in (("plain", ops.swizzle_scales), ("blocked", ops.plain_scales)):
                for axis, options in (("row", {}), ("column", {"offs": offs} | group)):
                    yield partial(change, copied(bf16, format, axis, scale_layout=scale_layout, **options), **ON)
    for dtype in (torch.float32, torch.float16):
        yield partial(ops.quantize, x[dtype], "mxfp8", **ON)
        yield partial(ops.dequantize, copied(bf16, "mxfp8", offs=offs), dtype, **ON)
    yield partial(ops.quantize, bf16[:, ::2], "mxfp8", **ON)
    for scale_layout, change in (("plain", ops.swizzle_scales), ("blocked", ops.plain_scales)):
        for axis, grouped in (("row", offs), ("column", None)):
            yield partial(change, copied(bf16, "mxfp8", axis, offs=grouped, scale_layout=scale_layout), **ON)
    yield partial(ops.quantize, bf16, "nvfp4", "both", scope="tensor", **ON)
    yield partial(ops.dequantize, copied(bf16, "nvfp4", "column", scope="tensor"), torch.bfloat16, **ON)
    for format in ("mxfp8", "mxfp4"):
        yield partial(ops.quantize, bf16, format, "both", offs=offs, scale_mode="floor", **ON)
    yield partial(ops.quantize, bf16, "mxfp8", "both", offs=many_groups(), **ON)


def routing():
    ids = torch.zeros(ROWS, 2, dtype=torch.int32)
    yield partial(ops.sort_by_expert, ids, EXPERTS, **ON)
    for experts, top_k in ((64, 8), (256, 8), (2048, 8)):
        logits, bias = torch.zeros(ROWS, experts), torch.zeros(experts)
        replay = torch.zeros(ROWS, top_k, dtype=torch.int32)
        grads = torch.zeros(ROWS, top_k), torch.zeros(experts), torch.zeros(1)
        known = Routing.from_ids(replay, grads[0], experts, backend="reference")
        yield partial(routed, logits, top_k)
        yield partial(routed, logits, top_k, score="sigmoid", bias=bias, num_groups=8, groups_kept=4, scale=2.5)
        yield partial(ops.route_backward, logits, known, *grads, **ON)
        if experts < 2048:
            yield partial(ops.route_backward, logits, known, *grads, score="sigmoid", **ON)
        if experts == 64:
            yield partial(routed, logits, top_k, normalize=False, replay=replay)
            yield partial(routed, logits, top_k, replay=replay, replay_threshold=0.5)
            yield partial(ops.route_backward, logits, known, grads[0], normalize=False, **ON)


def routed(logits, top_k, *, score="softmax", bias=None, num_groups=1, groups_kept=1, normalize=True, scale=1.0, replay=None,
           replay_threshold=None):  # fmt: skip
    """The verb alone: ids that no kernel wrote cannot be sorted."""
    tokens, experts = logits.shape
    kernels.run(
        "route", logits, bias, replay, top_k, score, num_groups, groups_kept, normalize, scale, replay_threshold,
        torch.empty(tokens, top_k, dtype=torch.int32), torch.empty(tokens, top_k), torch.empty(experts), torch.empty(1),
    )  # fmt: skip


def rows(offs: Tensor):
    ids = torch.arange(ROWS * 2, dtype=torch.int32).view(ROWS, 2) % EXPERTS
    known = Routing.from_ids(ids, torch.zeros(ROWS, 2), EXPERTS, backend="reference")
    both, row, column = ({"format": "mxfp8", "axis": axis} for axis in ("both", "row", "column"))
    interleaved = {"activation": SwiGLU(1.702, 7.0, 1.0), "gate_up": "interleaved"}
    for dtype in (torch.bfloat16, torch.float32):
        x, y = torch.zeros(ROWS, WIDTH, dtype=dtype), torch.zeros(2 * ROWS, WIDTH, dtype=dtype)
        yield partial(ops.unpermute, y, known, known.weights, **ON)
        for made in ({}, both, row, column) if dtype == torch.bfloat16 else ({},):
            yield partial(ops.permute, x, known, **made, **ON)
            yield partial(ops.unpermute_backward, x, known, known.weights, y, **made, **ON)
            for how in ({}, interleaved) if made in ({}, both) else ({},):
                yield partial(ops.swiglu, x, offs=offs, **how, **made, **ON)
                yield partial(ops.swiglu_backward, x[:, : WIDTH // 2], x, offs=offs, **how, **made, **ON)
    x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    yield partial(ops.unpermute, torch.zeros(2 * ROWS, WIDTH, dtype=torch.bfloat16), known, **ON)
    yield partial(ops.unpermute_backward, x, known, None, None, **ON)
    yield partial(ops.permute, x, known, format="mxfp8_e5m2", axis="both", **ON)


def products(offs: Tensor):
    """Of (ROWS, WIDTH) and weights (EXPERTS, WIDTH / 2, WIDTH), which dgrad reads by columns; of rows that 16 divides, and not."""
    outputs = WIDTH // 2
    pairs = [(f, f) for f in ("bf16", "fp16", "fp32", "mxfp8", "mxfp4", "nvfp4")]
    pairs += [("mxfp8_e5m2", "mxfp8"), ("bf16", "mxfp8"), ("bf16", "nvfp4")]
    for f, g in pairs:
        wide = f in DTYPES or FORMATS[f].bits == 8
        widths = (WIDTH,) if "fp16" in (f, g) or "mxfp4" in (f, g) else (WIDTH, WIDTH - 6)
        for width in widths:
            a, b = operand(f, ROWS, width), operand(g, EXPERTS, outputs, width)
            yield partial(ops.grouped_mm, a, b, offs, out_dtype=torch.bfloat16, in_fp32="fp32" in (f, g), **ON)
        if f == g and f in ("bf16", "mxfp8", "nvfp4"):
            a, b, bias = operand(f, ROWS, WIDTH), operand(g, EXPERTS, outputs, WIDTH), torch.zeros(EXPERTS, outputs)
            yield partial(ops.grouped_mm, a, b, offs, bias=bias, out_dtype=torch.float32, **ON)
        if wide and g not in ("nvfp4", "mxfp4"):
            weights = torch.zeros(EXPERTS, WIDTH, outputs)
            weights = weights.to(DTYPES[g]).mT if g in DTYPES else copied(weights, g, "column")
            yield partial(ops.grouped_mm, operand(f, ROWS, WIDTH), weights, offs, out_dtype=torch.bfloat16, **ON)
        if (f in DTYPES) == (g in DTYPES):
            scope = {"scope": "group"} if f == "nvfp4" else {}
            for width in widths:
                a, b = columns(f, outputs, offs, **scope), columns(g, width, offs, **scope)
                yield partial(ops.grouped_mm_wgrad, a, b, offs, **ON)
            if f == g and f in ("bf16", "mxfp8", "nvfp4"):
                out = torch.zeros(EXPERTS, outputs, WIDTH)
                a, b = columns(f, outputs, offs, **scope), columns(g, WIDTH, offs, **scope)
                yield partial(ops.grouped_mm_wgrad, a, b, offs, accumulate=True, out=out, **ON)
    a, b = operand("mxfp8", ROWS, WIDTH), operand("mxfp8", MANY_EXPERTS, 16, WIDTH)
    yield partial(ops.grouped_mm, a, b, many_groups(), **ON)
    a, b = columns("mxfp8", outputs, offs), columns("mxfp8", WIDTH, offs)
    yield partial(ops.grouped_mm_wgrad, a, b, offs, out_dtype=torch.bfloat16, **ON)
