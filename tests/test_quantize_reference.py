"""quantize and dequantize against the contract: its table of special values, known pitfalls, torchao and NumPy with ml_dtypes.
Every test runs on each backend."""

import math
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch

from mxmoe.formats import FORMATS
from tests.helpers import (
    FORMAT_NAMES,
    MX_FORMATS,
    backend_fixture,
    boundary_inputs,
    differences,
    scales_of,
    values_of,
)

backend = backend_fixture("quantize")
NAN, INF = float("nan"), float("inf")


def block(*head: float, length: int = 32, fill: float = 0.0, dtype=torch.float32) -> torch.Tensor:
    """One row whose first values are given."""
    return torch.tensor([[*head, *[fill] * (length - len(head))]], dtype=dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


# The table of special values (mxfp8; the other formats where it names them).


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("format", MX_FORMATS)
def test_zeros_have_scale_byte_0_and_keep_their_signs(backend, format, mode):
    t = backend.quantize(block(0.0, -0.0), format, scale_mode=mode)
    assert scales_of(t).tolist() == [[0]]
    assert bits(backend.dequantize(t))[0, :3].tolist() == [0, -0x80000000, 0]


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("special", [NAN, INF, -INF])
@pytest.mark.parametrize(("format", "code"), [("mxfp8", 0x7F), ("mxfp8_e5m2", 0x7F), ("mxfp4", 0x0)])
def test_nan_and_inf_poison_their_block(backend, format, code, special, mode):
    x = torch.ones(2, 96)
    x[0, 40] = special
    t = backend.quantize(x, format, scale_mode=mode)
    per_block = 32 * FORMATS[format].bits // 8
    poisoned = values_of(t)[0, per_block : 2 * per_block]
    assert scales_of(t)[0, 1] == 255
    assert (poisoned == code).all()
    y = backend.dequantize(t)
    assert y[0, 32:64].isnan().all()
    y[0, 32:64] = 1.0
    assert torch.equal(y, torch.ones(2, 96))


@pytest.mark.parametrize(
    ("amax", "mode", "scale", "code"),
    [
        (480.0, "rceil", 128, 0x77),
        (480.0, "floor", 127, 0x7E),
        (2.0**-126, "rceil", 0, 0x40),
        (2.0**-126, "floor", 0, 0x40),
        (2.0**-133, "rceil", 0, 0x08),
        (torch.finfo(torch.bfloat16).max, "rceil", 247, 0x78),
        (torch.finfo(torch.bfloat16).max, "floor", 246, 0x7E),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_special_values_mxfp8(backend, amax, mode, scale, code, dtype):
    t = backend.quantize(block(amax, dtype=dtype), "mxfp8", scale_mode=mode)
    assert (scales_of(t)[0, 0].item(), values_of(t)[0, 0].item()) == (scale, code)
    assert (values_of(t)[0, 1:] == 0).all()


def test_largest_bf16_dequantizes_to_inf(backend):
    t = backend.quantize(block(torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16), "mxfp8")
    assert backend.dequantize(t)[0, 0] == INF


# Pitfalls, by their ids.


def test_q01_all_zero_block_is_zero(backend):
    x = torch.ones(4, 64)
    x[1], x[2, 32:] = 0, 0
    for format, tolerance in (("mxfp8", 0.0), ("nvfp4", 1e-6)):
        t = backend.quantize(x, format)
        y = backend.dequantize(t)
        assert torch.equal(y == 0, x == 0)
        assert (y - x).abs().max() <= tolerance
        assert not (scales_of(t) == (255 if format == "mxfp8" else 0x7F)).any()


def test_q03_scale_byte_0_is_2_to_minus_127(backend):
    t = backend.quantize(torch.zeros(1, 32), "mxfp8")
    values_of(t).fill_(0x38)
    assert (bits(backend.dequantize(t)) == 0x00400000).all()
    t = backend.quantize(torch.zeros(1, 128), "mxfp8")
    values_of(t).fill_(0x78)  # 256
    a = torch.full((128,), 2.0**112, dtype=torch.bfloat16)
    assert (a.float() @ backend.dequantize(t)[0]).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_q05_nan_is_never_lost(backend, dtype):
    t = backend.quantize(torch.cat([block(NAN, fill=1.0), block(fill=1.0)], 1).to(dtype), "mxfp8")
    assert scales_of(t).tolist() == [[255, 119]]
    assert (values_of(t)[0, :32] == 0x7F).all()
    assert (backend.dequantize(t)[0, 32:] == 1.0).all()


def test_q07_scale_is_rounded_up_but_not_past_a_power_of_two(backend):
    x = torch.cat([block(v) for v in (448.0, 449.0, 500.0, 896.0)])
    for mode, scales, values in (
        ("rceil", [127, 128, 128, 128], [448.0, 448.0, 512.0, 896.0]),
        ("floor", [127, 127, 127, 128], [448.0, 448.0, 448.0, 896.0]),
    ):
        t = backend.quantize(x, "mxfp8", scale_mode=mode)
        assert scales_of(t)[:, 0].tolist() == scales
        assert backend.dequantize(t)[:, 0].tolist() == values
    amax = torch.linspace(1, 1000, 999)[:, None]
    y = backend.dequantize(backend.quantize(torch.cat([amax, torch.zeros(999, 31)], 1), "mxfp8"))[:, :1]
    assert ((y - amax).abs() <= 0.0625 * amax).all()


def test_q09_elements_saturate(backend):
    t = backend.quantize(block(464.0, 465.0, 480.0, -480.0), "mxfp8", scale_mode="floor")
    assert values_of(t)[0, :4].tolist() == [0x7E, 0x7E, 0x7E, 0xFE]


def test_q11_no_double_rounding(backend):
    t = backend.quantize(block(448.0, 1.0625001, 1.0625), "mxfp8")
    assert values_of(t)[0, 1:3].tolist() == [0x39, 0x38]


def test_q13_fp4_ties_go_to_even(backend):
    x = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 7.0]
    t = backend.quantize(block(*x, *[-v for v in x]), "mxfp4", scale_mode="floor")
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    assert scales_of(t).item() == 127
    assert backend.dequantize(t)[0, :18].tolist() == expected + [-v for v in expected]
    assert backend.dequantize(t)[0, 9].signbit()


def test_q15_negative_zeros(backend):
    t = backend.quantize(torch.full((1, 32), -0.0), "mxfp8")
    assert scales_of(t).item() == 0
    assert (values_of(t) == 0x80).all()
    t = backend.quantize(block(448.0, -1e-10), "mxfp8")
    assert values_of(t)[0, 1] == 0x80
    t = backend.quantize(torch.full((1, 32), -0.0), "nvfp4")
    assert (values_of(t) == 0).all()
    assert (scales_of(t) == 0).all()
    assert t.global_scale.item() == 1.0


def test_q17_underflowing_nvfp4_scale_zeroes_its_block(backend):
    threshold = 6 * 2.0**-10
    amaxes = [1e-3, threshold * (1 - 2**-20), threshold, threshold * (1 + 2**-20)]
    x = torch.cat([block(2688.0, length=16), *(block(v, length=16) for v in amaxes)], 1)
    t = backend.quantize(x, "nvfp4")
    assert t.global_scale.item() == 1.0
    assert scales_of(t)[0].tolist() == [0x7E, 0, 0, 0, 1]  # the tie goes to even: 0
    y = backend.dequantize(t)[0]
    assert (bits(y[16:64]) == 0).all()
    assert y.isfinite().all()


def test_q19_zero_rows_and_tensors(backend):
    for scope in ("row", "tensor"):
        t = backend.quantize(torch.zeros(32, 64), "nvfp4", scope=scope)
        assert (t.global_scale == 1).all()
        assert (bits(backend.dequantize(t)) == 0).all()
    x = torch.randn(6, 64)
    expected = backend.dequantize(backend.quantize(x, "nvfp4"))
    x[3], expected[3] = 0, 0
    assert torch.equal(backend.dequantize(backend.quantize(x, "nvfp4")), expected)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_q21_strided_views(backend, format):
    x = torch.arange(64 * 96, dtype=torch.float32).reshape(64, 96)
    views = {
        "t": x.t(), "[::2]": x[::2], "[:, ::2]": x[:, ::2], "[:, 5:69]": x[:, 5:69],
        "expand": x[:, None].expand(64, 2, 96)[:, 0], "row broadcast": x[:1].expand(64, 96),
        "column broadcast": x[:, :1].expand(64, 96), "bf16": x.bfloat16().t(), "fp16": x.half().t(),
    }  # fmt: skip
    for name, view in views.items():
        got = backend.quantize(view, format, "both", scope="tensor")
        expected = backend.quantize(view.contiguous(), format, "both", scope="tensor")
        assert [differences(*pair) for pair in zip(got, expected, strict=True)] == [0, 0], name


def test_q23_blocks_never_cross_rows(backend):
    x = torch.full((2, 48), 0.001)
    x[0, :32], x[0, 32:] = 1.0, 1000.0
    assert (backend.dequantize(backend.quantize(x, "mxfp8"))[1] == 0.0009765625).all()


def test_q25_floor_scale_of_every_power_of_two(backend):
    k = torch.arange(-126, 128)
    x = torch.cat([torch.exp2(k.float())[:, None], torch.zeros(len(k), 31)], 1)
    scales = scales_of(backend.quantize(x, "mxfp8", scale_mode="floor"))[:, 0]
    assert torch.equal(scales.long(), (k - 8 + 127).clamp(0, 254))
    assert [scales[k.tolist().index(i)].item() for i in (-119, -118, 0, 29, 127)] == [0, 1, 119, 148, 246]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_q27_stochastic_keeps_grid_values_and_specials(backend, seed):
    x = torch.zeros(4, 64)
    x[0, :2], x[1, :2] = torch.tensor([1.5, 448.0]), torch.tensor([1.5, -448.0])
    x[2, :32] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    x[3, 0] = -INF
    stochastic, nearest = (backend.quantize(x, "mxfp8", seed=s) for s in (seed, None))
    assert differences(stochastic, nearest) == 0
    assert scales_of(stochastic)[:, 0].tolist() == [127, 127, 255, 255]
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([1.5, 6.0, -0.5, 3.0])
    for format in ("mxfp4", "nvfp4"):
        assert differences(*(backend.quantize(x, format, seed=s) for s in (seed, None))) == 0
    x[0, 0] = NAN
    assert differences(*(backend.quantize(x, "nvfp4", seed=s) for s in (seed, None))) == 0


def test_q31_column_copy_comes_from_the_source(backend):
    x = torch.zeros(32, 32)
    x[0, 0], x[0, 1] = 448.0, 0.0147
    row, column = backend.quantize(x, "mxfp8", "both")
    assert (backend.dequantize(row)[0, 1].item(), backend.dequantize(column)[0, 1].item()) == (0.015625, 0.0146484375)
    of_transpose = backend.quantize(x.t(), "mxfp8")
    assert torch.equal(values_of(column).t(), values_of(of_transpose))
    assert torch.equal(scales_of(column), scales_of(of_transpose))


def test_q33_both_copies_of_2d_blocks_hold_the_same_values(backend):
    x = torch.randn(128, 128, dtype=torch.bfloat16)
    row, column = backend.quantize(x, "mxfp8", "both", block_2d=True)
    assert torch.equal(values_of(row), values_of(column))
    assert torch.equal(scales_of(row)[::32], scales_of(column)[::32].t())
    for axis, copy in (("row", row), ("column", column)):
        assert differences(copy, backend.quantize(x, "mxfp8", axis, block_2d=True)) == 0


def test_q35_misaligned_rows(backend):
    ramp = torch.linspace(-448, 448, 4099)
    for shift in (0, 1, 3):
        view = ramp[shift : shift + 4096].view(2, 2048)
        for format in FORMAT_NAMES:
            assert differences(backend.quantize(view, format), backend.quantize(view.clone(), format)) == 0
        assert not backend.dequantize(backend.quantize(view, "mxfp8")).isnan().any()


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("format", MX_FORMATS)
def test_q37_quantizing_again_changes_nothing(backend, format, mode):
    x = torch.randn(16, 64) * torch.exp(2 * torch.randn(16, 1))
    once = backend.dequantize(backend.quantize(x, format, scale_mode=mode))
    twice = backend.dequantize(backend.quantize(once, format, scale_mode=mode))
    assert torch.equal(bits(once), bits(twice))


# Outside oracles.


@cache
def from_torchao(format: str, mode: str, source: torch.dtype):
    """(input, scales, values) of its to_mx."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    dtype = torch.float4_e2m1fn_x2 if format == "mxfp4" else FORMATS[format].values_dtype
    x = boundary_inputs(1500, 128, 3, source)
    return x, *to_mx(x, dtype, 32, ScaleCalculationMode[mode.upper()])


@pytest.mark.parametrize("mode", ["rceil", "floor"])
@pytest.mark.parametrize("format", MX_FORMATS)
def test_equals_torchao_on_finite_blocks_with_scale_byte_1_or_more(backend, format, mode):
    fmt = FORMATS[format]
    for source in (torch.float32, torch.bfloat16):
        x, scales, values = from_torchao(format, mode, source)
        t = backend.quantize(x, format, scale_mode=mode)
        promised = scales_of(t) >= 1
        if mode == "rceil":  # its eager path takes ceil(log2(amax / max)), and FP32 log2 hides an excess below about 2^-17
            exponent = (x.unflatten(1, (-1, 32)).abs().amax(2).double() / fmt.max).log2()
            excess = exponent - exponent.floor()
            promised &= ~((excess > 0) & (excess < 2**-17))
        assert promised.sum() > 3000
        assert torch.equal(scales.view(torch.uint8)[promised], scales_of(t)[promised])
        by_block = [v.view(torch.uint8).reshape(*promised.shape, -1) for v in (values, t.values)]
        assert torch.equal(by_block[0][promised], by_block[1][promised])


@pytest.mark.parametrize("format", MX_FORMATS)
def test_rceil_of_the_neighbours_of_powers_of_two(backend, format):
    """amax = max * 2^k needs no step up, its upper neighbour does, whatever the exponent."""
    largest = FORMATS[format].max
    exact = largest * torch.exp2(torch.arange(-100, 100).float())
    above = (exact.view(torch.int32) + 1).view(torch.float32)
    for amax, step in ((exact, 0), (above, 1)):
        t = backend.quantize(torch.cat([amax[:, None], torch.zeros(200, 31)], 1), format)
        assert torch.equal(scales_of(t)[:, 0].int(), torch.arange(27, 227).int() + step)


def nvfp4_with_numpy(x: np.ndarray):
    """(element codes, block scale bytes, s_dec) of finite rows of a length divisible by 16, from ml_dtypes' casts."""
    f32 = np.float32
    s_dec = np.abs(x).max(1, keepdims=True) / f32(2688)
    s_dec[s_dec == 0] = 1
    blocks = x.reshape(len(x), -1, 16)
    s = np.minimum(np.abs(blocks).max(2) / f32(6) / s_dec, f32(448)).astype(ml_dtypes.float8_e4m3fn)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = blocks / (s.astype(f32) * s_dec)[..., None]
    scaled[s.astype(f32) == 0] = 0
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes.reshape(x.shape), s.view(np.uint8), s_dec[:, 0]


def test_nvfp4_equals_numpy(backend):
    x = boundary_inputs(2000, 128, 4)
    codes, scales, s_dec = nvfp4_with_numpy(x.numpy())
    t = backend.quantize(x, "nvfp4")
    assert (scales_of(t).numpy() != scales).sum() == 0
    assert (t.global_scale.numpy() != s_dec).sum() == 0
    assert (values_of(t).numpy() != (codes[:, ::2] | codes[:, 1::2] << 4)).sum() == 0
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(2000, -1, 16)
    expected = expected * scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[..., None] * s_dec[:, None, None]
    assert torch.equal(bits(backend.dequantize(t)), bits(torch.from_numpy(expected.reshape(2000, 128))))


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_nvfp4_special_value_poisons_its_scope_only(backend, special):
    x = torch.randn(4, 48)
    clean = backend.quantize(x, "nvfp4")
    x[2, 17] = special
    t = backend.quantize(x, "nvfp4")
    assert t.global_scale.view(torch.int32)[2] == 0x7FC00000
    assert (scales_of(t)[2] == 0x7F).all()
    assert (values_of(t)[2] == 0).all()
    assert backend.dequantize(t)[2].isnan().all()
    others = torch.tensor([0, 1, 3])
    for part in ("values", "scales", "global_scale"):
        a, b = (getattr(c, part).view(torch.uint8).reshape(4, -1)[others] for c in (t, clean))
        assert torch.equal(a, b)
    assert backend.dequantize(backend.quantize(x, "nvfp4", scope="tensor")).isnan().all()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_dequantize_rounds_once(backend, format, out_dtype):
    t = backend.quantize(boundary_inputs(200, 100, 5), format)
    expected = backend.dequantize(t).to(out_dtype)
    assert torch.equal(backend.dequantize(t, out_dtype).view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (1, 1), (3, 17), (33, 47), (2, 5, 40), (2, 0, 40), (0, 4, 32)])
def test_any_shape(backend, format, shape):
    """Tails of blocks and of packed pairs, empty axes: the same as with zeros appended, but not written."""
    x = torch.randn(shape)
    for axis in ("row", "column"):
        t = backend.quantize(x, format, axis, scope="tensor")
        padded = torch.nn.functional.pad(x, (0, -shape[-1] % 32, 0, -shape[-2] % 32))
        y = backend.dequantize(backend.quantize(padded, format, axis, scope="tensor"))
        assert torch.equal(bits(backend.dequantize(t)), bits(y[..., : shape[-2], : shape[-1]].contiguous()))
    if FORMATS[format].bits == 4 and shape[-1] % 2 and math.prod(shape):
        assert (values_of(backend.quantize(x, format))[..., -1] >> 4 == 0).all()
