"""Options and groups of quantize, each against a second, slower computation, and what quantization is invariant to. Every
test runs on each backend."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxmoe import decode, layout
from mxmoe.backends.reference.philox import random_words
from mxmoe.casts import ELEMENTS, round_to_codes
from mxmoe.formats import FORMATS, HADAMARD_SIGNS
from tests.helpers import (
    FORMAT_NAMES,
    MX_FORMATS,
    backend_fixture,
    backends_for,
    boundary_inputs,
    differences,
    scales_of,
    values_of,
)

backend = backend_fixture("quantize")
BACKENDS = backends_for("quantize")
GROUPINGS = ([0, 20, 160, 160, 300], [304], [0, 0, 0], [1, 2, 3, 4], [128, 256, 304])

GROUPED_OPTIONS = [(f, o) for f in FORMAT_NAMES for o in ({}, {"seed": 7})]
GROUPED_OPTIONS += [(f, {"scale_mode": "floor"}) for f in MX_FORMATS] + [("nvfp4", {"four_six": True})]


def unpacked(t) -> torch.Tensor:
    """Element codes, one per byte, (.., lines, contraction)."""
    values = values_of(t)
    if FORMATS[t.format].bits == 8:
        return values if t.axis == "row" else values.transpose(-1, -2)
    return torch.stack((values & 15, values >> 4), -1).flatten(-2)


# Hadamard


def hadamard_matrix() -> torch.Tensor:
    """The signed, orthonormal 16-point transform as a matrix (Sylvester's construction), FP64."""
    h = np.array([[1.0]])
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    signs = np.array([-1.0 if HADAMARD_SIGNS >> j & 1 else 1.0 for j in range(16)])
    return torch.from_numpy(h * signs / 4)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_hadamard_is_the_signed_sylvester_transform(backend, format):
    x = torch.randint(-100, 101, (48, 64)).float()  # sums are exact, so their order does not matter
    matrix = hadamard_matrix()
    assert torch.allclose(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    for axis in ("row", "column"):
        lines = x if axis == "row" else x.t()
        rotated = (lines.double().unflatten(1, (-1, 16)) @ matrix.T).flatten(1).float()
        rotated = rotated if axis == "row" else rotated.t()
        got = backend.quantize(x, format, axis, hadamard=True, scope="tensor")
        assert differences(got, backend.quantize(rotated, format, axis, scope="tensor")) == 0


def test_hadamard_rounds_each_butterfly(backend):
    """Against NumPy in FP32, stride by stride."""
    x = torch.randn(8, 32)
    y = (x * torch.tensor([-1.0 if HADAMARD_SIGNS >> j % 16 & 1 else 1.0 for j in range(32)])).numpy()
    for stride in (1, 2, 4, 8):
        for i in (i for i in range(32) if not i & stride):
            y[:, i], y[:, i + stride] = y[:, i] + y[:, i + stride], y[:, i] - y[:, i + stride]
    expected = backend.quantize(torch.from_numpy(y * np.float32(0.25)), "mxfp8")
    assert differences(backend.quantize(x, "mxfp8", hadamard=True), expected) == 0


# four_six


def four_six_with_numpy(x: np.ndarray):
    """(codes, scale bytes) of each 16-block of one row, candidate by candidate."""
    f32, e4m3, e2m1 = np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
    s_dec = np.abs(x).max() / f32(1536)
    codes, scales = [], []
    for block in x.reshape(-1, 16):
        candidates = []
        for divisor in (6, 4):
            s = (np.abs(block).max() / f32(divisor) / s_dec).astype(e4m3)
            q = np.zeros(16, e2m1) if s == 0 else np.clip(block / (s.astype(f32) * s_dec), -6, 6).astype(e2m1)
            error = q.astype(f32) * s.astype(f32) * s_dec - block
            squares = error * error
            for half in (8, 4, 2, 1):
                squares = squares[:half] + squares[half:]
            candidates.append((squares[0], s, q))
        chosen = candidates[1] if candidates[1][0] < candidates[0][0] else candidates[0]
        scales.append(chosen[1].view(np.uint8))
        codes.append(chosen[2].view(np.uint8))
    return np.concatenate(codes), np.array(scales), s_dec


def test_four_six_takes_the_scale_that_errs_less(backend):
    x = torch.randn(40, 64) * torch.exp2(torch.randint(-6, 6, (40, 4)).repeat_interleave(16, 1).float())
    x[0, :16] = 0.0
    t = backend.quantize(x, "nvfp4", four_six=True)
    fours = 0
    for row in range(40):
        codes, scales, s_dec = four_six_with_numpy(x[row].numpy())
        zero = np.repeat(scales, 16) == 0
        assert (np.where(zero, 0, codes) == unpacked(t)[row].numpy()).all()
        assert (scales == scales_of(t)[row].numpy()).all()
        assert s_dec == t.global_scale[row].item()
        fours += (unpacked(t)[row].reshape(-1, 16) & 7).max(1).values.eq(6).sum().item()
    assert 20 < fours < 140  # 160 blocks; both candidates are used
    plain = backend.dequantize(backend.quantize(x, "nvfp4")) - x
    assert (backend.dequantize(t) - x).square().sum() < plain.square().sum()


def test_four_six_with_a_seed_keeps_the_scales(backend):
    x = torch.randn(16, 64)
    t, stochastic = (backend.quantize(x, "nvfp4", four_six=True, seed=seed) for seed in (None, 9))
    assert torch.equal(scales_of(t), scales_of(stochastic))
    assert differences(t, stochastic) > 0


# block_2d


@pytest.mark.parametrize(("format", "block"), [("mxfp8", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("shape", [(64, 96), (3, 70, 50), (1, 1)])
def test_block_2d_has_one_scale_per_tile(backend, format, block, shape):
    """A tile's scale is that of a single block holding its largest element; both copies hold the same values."""
    x = torch.randn(shape)
    options = {"block_2d": True, "scope": "tensor"}
    for extra in ({}, {"seed": 3}, {"four_six": True}):
        if extra.get("four_six") and format != "nvfp4":
            continue
        row, column = backend.quantize(x, format, "both", **options, **extra)
        assert torch.equal(unpacked(row)[..., : shape[-1]], unpacked(column)[..., : shape[-2]].transpose(-1, -2))
        assert torch.equal(scales_of(row)[..., ::block, :], scales_of(column)[..., ::block, :].transpose(-1, -2))
        assert torch.equal(backend.dequantize(row), backend.dequantize(column))
    pad = torch.nn.functional.pad(x, (0, -shape[-1] % block, 0, -shape[-2] % block))
    tiles = pad.unflatten(-1, (-1, block)).unflatten(-3, (-1, block)).abs().amax((-3, -1))
    spread = torch.zeros(*pad.shape[:-2], tiles.shape[-2], pad.shape[-1])
    spread[..., ::block] = tiles
    expected = backend.quantize(spread, format, scope="tensor")
    t = backend.quantize(x, format, **options)
    assert torch.equal(scales_of(t)[..., ::block, :], scales_of(expected))
    lines = torch.arange(shape[-2]) // block * block
    assert torch.equal(scales_of(t), scales_of(t)[..., lines, :])


def test_block_2d_poisons_its_tile(backend):
    x = torch.ones(64, 64)
    x[40, 3] = float("nan")
    for t in backend.quantize(x, "mxfp8", "both", block_2d=True):
        y = backend.dequantize(t)
        assert y[32:, :32].isnan().all()
        assert y.nan_to_num(1.0).eq(1.0).all()


# Stochastic rounding


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("axis", ["row", "column"])
def test_stochastic_uses_word_i_of_the_copys_stream(backend, format, axis):
    x = torch.randn(2, 48, 40)
    seed = 0x0123456789ABCDEF
    fmt = FORMATS[format]
    t, nearest = (backend.quantize(x, format, axis, scope="tensor", seed=s) for s in (seed, None))
    assert torch.equal(scales_of(t), scales_of(nearest))
    words = random_words(x.numel(), seed, 1 if axis == "column" else 0, x.device).view(x.shape)
    lines, words = (x, words) if axis == "row" else (x.transpose(1, 2), words.transpose(1, 2))
    scales = decode(scales_of(t), fmt.scale_element)
    if fmt.has_global_scale:
        scales = scales * t.global_scale
    scaled = lines / scales.repeat_interleave(fmt.block, 2)[..., : lines.shape[2]]
    expected = round_to_codes(scaled.contiguous(), ELEMENTS[fmt.element], words)
    assert torch.equal(unpacked(t)[..., : lines.shape[2]], expected.to(torch.uint8))


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_stochastic_is_unbiased(backend, format):
    x = torch.rand(128, 64) * 0.9 + 0.05
    x[:, 0] = 1.0
    seeds = 32
    draws = torch.stack([backend.dequantize(backend.quantize(x, format, seed=seed)) for seed in range(seeds)])
    step = draws.amax(0) - draws.amin(0)
    bias = (draws.mean(0) - x) / step.clamp(min=1e-6)
    assert bias[step > 0].mean().abs() < 5 * 0.5 / (seeds * 128 * 64) ** 0.5
    nearest = backend.dequantize(backend.quantize(x, format))
    assert (draws.mean(0) - x).abs().mean() < 0.5 * (nearest - x).abs().mean()


def test_seeds_and_copies_draw_differently(backend):
    x = torch.randn(64, 64)
    a, b = (backend.quantize(x, "mxfp8", seed=seed) for seed in (1, 1 << 32))
    assert differences(a, b) > 100
    assert differences(a, backend.quantize(x, "mxfp8", seed=1)) == 0


# Groups


@pytest.mark.parametrize("ends", GROUPINGS)
@pytest.mark.parametrize(("format", "options"), GROUPED_OPTIONS)
def test_each_group_is_quantized_as_if_alone(backend, format, options, ends):
    fmt = FORMATS[format]
    x = boundary_inputs(304, 24, 11, finite=False)
    offs = torch.tensor(ends, dtype=torch.int32)
    x[ends[-1] :] = float("nan")  # never read
    row, column = backend.quantize(x, format, "both", offs=offs, scope="group", **options)
    starts, sizes = layout.padded_starts(offs).tolist(), layout.padded_sizes(offs).tolist()
    written = torch.zeros_like(unpacked(column), dtype=torch.bool)
    for g, (first, end) in enumerate(itertools.pairwise([0, *ends])):
        alone = x[None, first:end]
        alone_row, alone_column = backend.quantize(alone, format, "both", scope="group", **options)
        assert torch.equal(values_of(row)[first:end], values_of(alone_row)[0])
        assert torch.equal(scales_of(row)[first:end], scales_of(alone_row)[0])
        at = slice(starts[g], starts[g] + end - first)
        assert torch.equal(unpacked(column)[:, at], unpacked(alone_column)[0][:, : end - first])
        written[:, at] = True
        blocks = scales_of(column)[:, starts[g] // fmt.block : (starts[g] + sizes[g]) // fmt.block]
        own = -(-(end - first) // fmt.block)
        assert torch.equal(blocks[:, :own], scales_of(alone_column)[0])
        assert (blocks[:, own:] == 0).all()
        if fmt.has_global_scale:
            for grouped, single in ((row, alone_row), (column, alone_column)):
                assert grouped.global_scale[g].view(torch.int32) == single.global_scale.view(torch.int32)
    assert (unpacked(column)[~written] == 0).all()
    assert (scales_of(column)[:, (starts[-1] + sizes[-1]) // fmt.block :] == 0).all()
    assert (values_of(row)[ends[-1] :] == 0).all()
    assert (scales_of(row)[ends[-1] :] == 0).all()
    for copy in (row, column):
        y = backend.dequantize(copy)
        assert (y[ends[-1] :].view(torch.int32) == 0).all()


def test_scopes_with_groups(backend):
    x = torch.randn(60, 32)
    offs = torch.tensor([0, 20, 20, 50], dtype=torch.int32)
    row = backend.quantize(x, "nvfp4", offs=offs, scope="row")
    assert differences(row, backend.quantize(torch.cat([x[:50], torch.zeros(10, 32)]), "nvfp4", offs=offs)) == 0
    assert torch.equal(row.global_scale[:50], backend.quantize(x[:50], "nvfp4").global_scale)
    assert (row.global_scale[50:] == 0).all()
    x[55] = 1000.0
    tensor = backend.quantize(x, "nvfp4", offs=offs, scope="tensor")
    assert torch.equal(tensor.global_scale, backend.quantize(x[:50], "nvfp4", scope="tensor").global_scale)
    group = backend.quantize(x, "nvfp4", offs=offs, scope="group")
    assert group.global_scale[[0, 2]].tolist() == [1.0, 1.0]  # empty


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_hadamard_groups_as_if_alone(backend, format):
    x = torch.randn(96, 32)
    offs = torch.tensor([16, 16, 80], dtype=torch.int32)
    t = backend.quantize(x, format, "column", offs=offs, hadamard=True, scope="group")
    first = backend.quantize(x[None, 16:80], format, "column", hadamard=True, scope="group")
    assert torch.equal(unpacked(t)[:, 128:192], unpacked(first)[0])
    assert torch.equal(scales_of(t)[:, 128 // FORMATS[format].block :][:, : first.scales.shape[2]], scales_of(first)[0])


# Invariances


@settings(max_examples=40)
@given(st.sampled_from(BACKENDS), st.sampled_from(FORMAT_NAMES), st.integers(1, 9), st.integers(1, 70), st.integers(0, 999))
def test_round_trip_stays_within_half_a_step(backend, format, rows, length, seed):
    """|x - dequantized| <= half the spacing of the element grid at the block's amax, in units of the scale."""
    x = boundary_inputs(rows, length, seed)
    x = torch.where(x.abs() < 2.0**100, x, 1.0)
    t = backend.quantize(x, format)
    fmt = FORMATS[format]
    scale = decode(scales_of(t), fmt.scale_element)
    if fmt.has_global_scale:
        scale = scale * t.global_scale[:, None]
    scale = scale.repeat_interleave(fmt.block, 1)[:, :length].double()
    half_step = {"e4m3": 16.0, "e5m2": 4096.0, "e2m1": 1.0}[fmt.element]
    nvfp4_slack = (6 * 2.0**-9 * t.global_scale[:, None]).double() if fmt.has_global_scale else 0.0
    assert ((backend.dequantize(t).double() - x.double()).abs() <= half_step * scale * 1.07 + nvfp4_slack).all()


@settings(max_examples=40)
@given(st.sampled_from(BACKENDS), st.sampled_from(MX_FORMATS), st.sampled_from(["rceil", "floor"]), st.integers(-60, 60))
def test_mx_is_invariant_to_powers_of_two(backend, format, mode, exponent):
    x = torch.randn(8, 64)
    t, shifted = (backend.quantize(v, format, scale_mode=mode) for v in (x, x * 2.0**exponent))
    assert torch.equal(values_of(t), values_of(shifted))
    assert torch.equal(scales_of(t).int() + exponent, scales_of(shifted).int())


@settings(max_examples=40)
@given(st.sampled_from(BACKENDS), st.sampled_from(FORMAT_NAMES), st.integers(0, 999), st.data())
def test_a_tokens_bytes_depend_on_it_alone(backend, format, seed, data):
    """Any selection of tokens, in any order, alone or in any batch."""
    x = boundary_inputs(12, 48, seed, finite=False)
    picked = torch.tensor(data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=14)))
    t, other = backend.quantize(x, format), backend.quantize(x[picked], format)
    assert torch.equal(values_of(t)[picked], values_of(other))
    assert torch.equal(scales_of(t)[picked], scales_of(other))
    if t.global_scale is not None:
        assert torch.equal(t.global_scale[picked].view(torch.int32), other.global_scale.view(torch.int32))


@settings(max_examples=20)
@given(st.sampled_from(BACKENDS), st.sampled_from(FORMAT_NAMES), st.integers(0, 99))
def test_both_equals_each_and_a_stack_equals_its_parts(backend, format, seed):
    x = boundary_inputs(3 * 20, 40, seed).view(3, 20, 40)
    row, column = backend.quantize(x, format, "both", scope="group")
    assert differences(row, backend.quantize(x, format, "row", scope="group")) == 0
    assert differences(column, backend.quantize(x, format, "column", scope="group")) == 0
    for e in range(3):
        alone = backend.quantize(x[e : e + 1], format, "both", scope="group")
        for stacked, single in zip((row, column), alone, strict=True):
            assert torch.equal(values_of(stacked)[e], values_of(single)[0])
            assert torch.equal(scales_of(stacked)[e], scales_of(single)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_bf16_and_fp16_give_the_bytes_of_their_fp32_values(backend, format, dtype):
    x = boundary_inputs(150, 72, 6, dtype, finite=False)
    for options in ({}, {"seed": 5}):
        got = backend.quantize(x, format, "both", scope="tensor", **options)
        expected = backend.quantize(x.float(), format, "both", scope="tensor", **options)
        assert [differences(*pair) for pair in zip(got, expected, strict=True)] == [0, 0]
