"""Weights in panels: where their bytes lie, and that every verb gives the bytes of weights in lines."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxmoe import _C, MXTensor, load_mxtensors, moe_experts, ops, prepare_experts, quantize, save_mxtensors, to_panels
from mxmoe.backends.host import use_isa
from mxmoe.formats import FORMATS
from tests.helpers import FORMAT_NAMES, assert_same_bits, differences, num_threads

E, R, L = 3, 128, 96
formats = pytest.mark.parametrize("format", FORMAT_NAMES)
isas = pytest.mark.parametrize("isa", _C.isas())


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


@formats
def test_where_bytes_lie(format):
    """docs/layouts.md, written out for a few elements; two elements of a packed format share a byte."""
    f = FORMATS[format]
    t = to_panels(quantize(torch.randn(E, R, L), format))
    lines = ops.plain_scales(t)
    per_byte, per_word = 8 // f.bits, 32 // f.bits
    for e, line, k in ((0, 0, 0), (1, 5, 34), (2, 127, 95), (0, 64, 31), (1, 77, 50), (2, 21, 37)):
        word = k % 32 // per_word
        byte = line % 64 * 4 + k % 8 // 2 if f.bits == 4 else line % 64 // 4 * 16 + k % 4 // 2 * 8 + line % 4 * 2 + k % 2
        assert bytes_of(t.values)[e, line // 64, k // 32, word * 256 + byte] == bytes_of(lines.values)[e, line, k // per_byte]
        assert bytes_of(t.scales)[e, line // 64, k // f.block, line % 64] == bytes_of(lines.scales)[e, line, k // f.block]


@formats
def test_it_is_the_same_copy(format, tmp_path):
    x = torch.randn(E, R, L)
    lines = quantize(x, format)
    t = to_panels(lines)
    assert (t.panels, lines.panels, t.nbytes) == (True, False, lines.nbytes)
    assert "panels" in repr(t)
    assert to_panels(t) is t
    assert differences(ops.plain_scales(t), lines) == 0
    assert torch.equal(t.dequantize(), lines.dequantize())
    assert torch.equal(t.dequantize(backend="reference"), lines.dequantize())
    save_mxtensors(tmp_path / "t", {"t": t})
    for copy in (pickle.loads(pickle.dumps(t)), load_mxtensors(tmp_path / "t")["t"], t.to("cpu")):
        assert isinstance(copy, MXTensor)
        assert copy.panels
        assert differences(copy, t) == 0


@isas
@formats
@pytest.mark.parametrize("sizes", [(1, 0, 3), (8, 2, 5), (70, 1, 9)])
@pytest.mark.parametrize("special", [None, 0.0, 1e30, 1e-38, float("nan")])
def test_products_have_the_bits_of_lines(isa, format, sizes, special):
    """Of few rows and of many, with scales that leave the exact range."""
    w = torch.randn(E, R, L)
    if special is not None:
        w[0, 70, ::7], w[2, 3, 32:64] = special, 0.0
    lines, offs = quantize(w, format), torch.tensor(sizes).cumsum(0).int()
    x = torch.randn(sum(sizes), L).bfloat16()
    for a in (x, quantize(x, "mxfp8")):
        with use_isa(isa):
            expected = ops.grouped_mm(a, lines, offs, out_dtype=torch.float32)
            assert_same_bits(ops.grouped_mm(a, to_panels(lines), offs, out_dtype=torch.float32), expected)
            with num_threads(1):
                assert_same_bits(ops.grouped_mm(a, to_panels(lines), offs, out_dtype=torch.float32), expected)
    expected = ops.grouped_mm(x, lines, offs, backend="reference")
    assert_same_bits(ops.grouped_mm(x, to_panels(lines), offs, backend="reference"), expected)


@isas
@settings(max_examples=25)
@given(
    format=st.sampled_from(["bf16", *FORMAT_NAMES]),
    sizes=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    outputs=st.integers(1, 150),
    contraction=st.integers(1, 50).map(lambda n: 2 * n) | st.sampled_from([512, 33]),
    special=st.sampled_from([None, 0.0, 1e30, 1e-38, float("inf"), float("nan")]),
    codes=st.booleans(),
    seed=st.integers(0, 99),
)
def test_few_rows_on_every_instruction_set(isa, format, sizes, outputs, contraction, special, codes, seed):
    """A group of 9 rows takes the other kernel; `codes`: any bytes as values, Inf and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    if format in ("mxfp4", "nvfp4"):
        contraction += contraction % 2
    a = torch.randn(sum(sizes), contraction, generator=generator).bfloat16()
    w = torch.randn(len(sizes), outputs, contraction, generator=generator)
    if special is not None:
        w[0, outputs // 2, ::7] = special
    weights = w.bfloat16() if format == "bf16" else quantize(w, format)
    if codes and format != "bf16":
        values = bytes_of(weights.values)
        values.copy_(torch.randint(256, values.shape, generator=generator, dtype=torch.uint8))
    ends = torch.tensor(sizes).cumsum(0)
    many = torch.cat([torch.arange(end - size, end).repeat(9) for end, size in zip(ends.tolist(), sizes, strict=True)])
    starts = 9 * ends - 9 * torch.tensor(sizes)
    of_few = torch.cat([torch.arange(start, start + size) for start, size in zip(starts.tolist(), sizes, strict=True)])
    with use_isa(isa):
        few = ops.grouped_mm(a, weights, ends.int(), out_dtype=torch.float32)
        assert_same_bits(few, ops.grouped_mm(a[many], weights, (9 * ends).int(), out_dtype=torch.float32)[of_few])


@isas
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_moe_decode_has_the_bits_of_lines(isa, format):
    x, ids, share = torch.randn(3, 128).bfloat16(), torch.randint(-1, E, (3, 2)), torch.rand(3, 2)
    weights = [quantize(torch.randn(E, o, c) / 8, format) for o, c in ((128, 128), (128, 64))]
    options = dict(recipe=format, activations="bf16")
    with use_isa(isa):
        expected = ops.moe_decode(x, ids, share, *weights, **options)
        panels = [to_panels(w) for w in weights]
        for _ in range(2):  # the second call goes past the checks
            assert_same_bits(ops.moe_decode(x, ids, share, *panels, **options), expected)
        assert_same_bits(ops.moe_decode(x, ids, share, panels[0], weights[1], **options), expected)
    assert_same_bits(
        ops.moe_decode(x, ids, share, *panels, **options, backend="reference"),
        ops.moe_decode(x, ids, share, *weights, **options, backend="reference"),
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_layer_with_frozen_panels(recipe):
    x, ids, share = torch.randn(20, 64).bfloat16(), torch.randint(E, (20, 2)), torch.rand(20, 2)
    w13, w2 = torch.randn(E, 128, 64) / 8, torch.randn(E, 64, 64) / 8
    lines, results = [quantize(w, recipe) for w in (w13, w2)], []
    for weights in (lines, [to_panels(w) for w in lines]):
        leaf = x.clone().requires_grad_()
        y = moe_experts(leaf, ids, share, *weights, recipe=recipe)
        results.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), leaf)))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    prepared = prepare_experts(w13, w2, recipe, backward=False)
    assert prepared.w13.panels
    assert prepared.w2.panels
    with torch.no_grad():
        assert_same_bits(moe_experts(x, ids, share, w13, w2, recipe=recipe, prepared=prepared), results[0][0])
    assert not prepare_experts(w13[:, :96], w2[:, :, :48], recipe, backward=False).w13.panels


def test_refused():
    with pytest.raises(TypeError, match="t must be an MXTensor"):
        to_panels(torch.ones(1, 64, 32))
    for t in (
        quantize(torch.ones(64, 32), "mxfp8"),
        quantize(torch.ones(1, 65, 32), "mxfp8"),
        quantize(torch.ones(1, 64, 48), "mxfp8"),
        quantize(torch.ones(1, 64, 64), "mxfp8", "column"),
        quantize(torch.ones(1, 64, 32), "nvfp4", scope="tensor"),
    ):
        with pytest.raises(ValueError, match=r"t must be a row copy .* to lie in panels, got MXTensor"):
            to_panels(t)
    t = to_panels(quantize(torch.ones(1, 64, 32), "mxfp8"))
    with pytest.raises(ValueError, match=r"values must have shape \(1, 1, 1, 2048\)"):
        t.replace(values=t.values.view(1, 1, 2, 1024))
    with pytest.raises(ValueError, match="panels need a shape"):
        t.replace(shape=(1, 64, 16))
    with pytest.raises(ValueError, match="panels are of a row copy"):
        t.replace(axis="column")
