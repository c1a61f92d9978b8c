"""The host backend's quantize, dequantize and swizzle_scales equal the reference byte for byte: every format, axis, dtype, option
and instruction set, any strides, thread count and floating-point state. Outputs are poisoned before each call."""

import pytest
import torch

from mxmoe import _C
from mxmoe.formats import FORMATS
from tests.helpers import FORMAT_NAMES, MX_FORMATS, Backend, boundary_inputs, differences, values_of

REFERENCE = Backend("reference")
HOSTS = [Backend("host", isa) for isa in _C.isas()]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (rows, length): tails in both directions, one element, tiles of 32 x 256 and spans of 2048 crossed, nothing at all.
SHAPES = ((1, 1), (1, 31), (33, 17), (130, 300), (34, 2090), (0, 64), (5, 0))

OPTIONS = [(f, {"scale_mode": m}) for f in MX_FORMATS for m in ("rceil", "floor")]
OPTIONS += [("nvfp4", {"scope": "row"}), ("nvfp4", {"scope": "tensor"})]
OPTIONS += [(f, {"seed": 2**40 + 5, "scope": "tensor"}) for f in FORMAT_NAMES]
OPTIONS += [("nvfp4", {"four_six": True, "scope": s}) for s in ("row", "tensor")]
OPTIONS += [("nvfp4", {"four_six": True, "block_2d": True, "scope": "tensor"})]
OPTIONS += [(f, {"block_2d": True, "scope": "tensor"}) for f in ("mxfp8", "nvfp4")]
OPTIONS += [("mxfp8", {"block_2d": True, "seed": 3})]


def name(option) -> str:
    return "-".join([option[0], *(f"{k}={v}" for k, v in option[1].items())])


@pytest.fixture(autouse=True)
def one_thread():
    """The reference's many small operations on two threads wait for each other where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=HOSTS, ids=str)
def host(request) -> Backend:
    return request.param


def axes(format: str, options: dict) -> tuple[str, ...]:
    return ("row",) if format == "nvfp4" and options.get("scope", "row") == "row" else ("row", "both")


def check(x, format, axis, **options):
    """One call of the reference, one of each instruction set: no byte differs."""
    expected = REFERENCE.quantize(x, format, axis, **options)
    for host in HOSTS:
        got = host.quantize(x, format, axis, **options)
        pairs = zip(expected, got, strict=True) if axis == "both" else [(expected, got)]
        assert [differences(e, g) for e, g in pairs] in ([0], [0, 0]), (str(host), axis, options, x.shape, x.dtype)


def same_floats(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, any NaN equal to any other."""
    whole = torch.int32 if a.dtype == torch.float32 else torch.int16
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a.view(whole)[~nan], b.view(whole)[~nan])


@pytest.mark.parametrize("option", OPTIONS, ids=name)
def test_equals_the_reference(option):
    format, options = option
    for seed, shape in enumerate(SHAPES):
        for dtype in DTYPES if min(shape) < 32 else (DTYPES[seed % 3], torch.bfloat16):
            for axis in axes(format, options):
                check(boundary_inputs(*shape, seed, dtype, finite=bool(seed % 2)), format, axis, **options)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_hadamard_equals_the_reference(format):
    for shape in ((16, 48), (144, 272)):
        for options in ({}, {"seed": 9}):
            x = boundary_inputs(*shape, 1, finite=False)
            check(x, format, "both", hadamard=True, scope="tensor", **options)


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("ends", [[0, 20, 150, 150, 280], [300], [0, 0], [128, 256, 300]], ids=str)
def test_groups_equal_the_reference(format, ends):
    offs = torch.tensor(ends, dtype=torch.int32)
    x = boundary_inputs(300, 70, 4, torch.bfloat16, finite=False)
    x[ends[-1] :] = float("nan")  # never read
    for scope in ("row", "tensor", "group"):
        for seed in (None, 11):
            for axis in axes(format, {"scope": scope}):
                check(x, format, axis, offs=offs, scope=scope, seed=seed)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_stacks_and_their_scopes_equal_the_reference(format):
    x = boundary_inputs(3 * 40, 70, 5, finite=False).view(3, 40, 70)
    for scope in ("tensor", "group"):
        for seed in (None, 11):
            check(x, format, "both", scope=scope, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_q21_views_of_any_strides(host, format, dtype):
    x = boundary_inputs(130, 192, 6, dtype)
    views = (
        x.t(),
        x[::2],
        x[:, ::2],
        x[1:, 3:],
        x[:, None].expand(130, 2, 192)[:, 0],
        x[:1].expand(40, 192),
        x[:, :1].expand(130, 64),
    )
    for view in views:
        for axis in ("row", "column"):
            got = host.quantize(view, format, axis, scope="tensor")
            assert differences(got, host.quantize(view.contiguous(), format, axis, scope="tensor")) == 0


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize("mode", ["rceil", "floor"])
def test_every_bf16_value_as_the_block_maximum(format, mode):
    x = torch.arange(0x8000).to(torch.int16).view(torch.bfloat16)[:, None] * torch.tensor([1.0, -0.3, 0.01, 2.0**-9])
    x = torch.cat([x.bfloat16(), torch.zeros(0x8000, 28, dtype=torch.bfloat16)], 1)
    check(x.view(4096, -1), format, "row", scale_mode=mode)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_ties_of_four_bit_rows_under_any_scale(format):
    g = torch.Generator().manual_seed(12)
    x = torch.randint(-16, 17, (300, 544), generator=g) * torch.exp2(torch.randint(-6, 3, (300, 544), generator=g).float())
    x = x * torch.exp2(torch.randint(-130, 120, (300, 1), generator=g).float())
    check(x.bfloat16(), format, "row")


def test_large_outputs_are_streamed_to_the_same_bytes(host):
    x = torch.randn(4096, 4128, generator=torch.Generator().manual_seed(7)).bfloat16()
    whole = host.quantize(x, "mxfp8")
    rows = torch.cat([values_of(host.quantize(part, "mxfp8")) for part in x.split(1024)])
    assert torch.equal(values_of(whole), rows)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_threads_and_flushing_callers_change_nothing(host, format):
    x = boundary_inputs(300, 2100, 8, finite=False)
    expected = REFERENCE.quantize(x, format, "both", scope="tensor")
    values = [REFERENCE.dequantize(t) for t in expected]
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.set_flush_denormal(True)
            got = host.quantize(x, format, "both", scope="tensor")
            decoded = [host.dequantize(t) for t in got]
            torch.set_flush_denormal(False)
            assert [differences(e, g) for e, g in zip(expected, got, strict=True)] == [0, 0]
            assert all(same_floats(a, b) for a, b in zip(values, decoded, strict=True))
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_dequantize_equals_the_reference(host, format, dtype):
    offs = torch.tensor([0, 20, 150, 150, 280], dtype=torch.int32)
    for shape, groups, scope in (
        ((33, 17), None, "tensor"),
        ((300, 70), offs, "group"),
        ((70, 2090), None, "row"),
        ((0, 64), None, "row"),
    ):
        x = boundary_inputs(*shape, 9, finite=False)
        for axis in ("row", "column") if scope != "row" else ("row",):
            t = REFERENCE.quantize(x, format, axis, offs=groups, scope=scope)
            assert same_floats(REFERENCE.dequantize(t, dtype), host.dequantize(t, dtype)), (shape, axis)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_dequantize_of_any_bytes(host, format):
    """Every element code under every scale byte."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    fmt = FORMATS[format]
    x = torch.zeros(256, 256 * 8 // fmt.bits)
    t = REFERENCE.quantize(x, format, scope="tensor")
    t.values.view(torch.uint8).copy_(codes)
    t.scales.view(torch.uint8).copy_(torch.arange(256, dtype=torch.uint8)[:, None].expand(t.scales.shape))
    assert same_floats(REFERENCE.dequantize(t), host.dequantize(t))


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("ends", [None, [0, 20, 150, 150, 280]], ids=str)
@pytest.mark.parametrize("axis", ["row", "column"])
def test_swizzle_equals_the_reference(host, format, axis, ends):
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    t = REFERENCE.quantize(boundary_inputs(300, 200, 10), format, axis, offs=offs, scope="tensor")
    blocked = host.swizzle(t)
    assert torch.equal(blocked, REFERENCE.swizzle(t))
    assert torch.equal(host.unswizzle(t, blocked), t.scales.view(torch.uint8))
