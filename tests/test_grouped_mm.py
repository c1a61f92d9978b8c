"""grouped_mm and grouped_mm_wgrad of each backend, on each instruction set, against FP64 on the same operand bytes."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mxmoe
from mxmoe import ops
from mxmoe.formats import FORMATS
from tests.gemm_cases import (
    DTYPES,
    OPERAND_FORMATS,
    Problem,
    assert_within_bound,
    column_operand,
    operand,
    products,
    wgrad_products,
)
from tests.helpers import assert_same_bits, backend_fixture, backends_for, flushed_subnormals, num_threads, poisoned

BF16 = torch.bfloat16
NAN = float("nan")
HOST = [b for b in backends_for("grouped_mm") if b.name == "host"]
backend = backend_fixture("grouped_mm")

PROBLEMS = st.builds(
    Problem,
    sizes=st.lists(st.sampled_from([0, 1, 2, 5, 6, 7, 13, 64, 65]), min_size=1, max_size=4).map(tuple),
    outputs=st.sampled_from([1, 15, 64, 65, 130]),
    contraction=st.sampled_from([1, 2, 16, 31, 33, 64, 96, 257]),
    past=st.sampled_from([0, 3]),
)
# Two high-precision operands have one dtype; anything goes with a quantized one.
PAIRS = [(f, f) for f in OPERAND_FORMATS] + [("bf16", "mxfp8"), ("fp32", "nvfp4"), ("mxfp8_e5m2", "mxfp8"), ("nvfp4", "mxfp8")]


def grouped_mm(backend, a, b, offs, dtype=BF16, bias=None):
    out = poisoned((a[0].shape[0], b[0].shape[1]), dtype)
    backend.run("grouped_mm", a, b, offs, bias, out)
    return out


def wgrad(backend, a, b, offs, padded, dtype=torch.float32, out=None):
    accumulate = out is not None
    out = out.clone() if accumulate else poisoned((offs.shape[0], a[0].shape[0], b[0].shape[0]), dtype)
    backend.run("grouped_mm_wgrad", a, b, offs, padded, accumulate, out)
    return out


def random_operands(p: Problem, formats, seed=0):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(p.rows, p.contraction, generator=g)
    b = torch.randn(len(p.sizes), p.outputs, p.contraction, generator=g)
    return operand(a, formats[0]), operand(b, formats[1])


def rows_of(a, index):
    """The operand's lines `index`."""
    return (*(None if t is None else t.view(torch.uint8)[index].view(t.dtype) if t.element_size() == 1 else t[index]
              for t in a[:3]), a[3])  # fmt: skip


def line_major(t):
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("backend", backends_for("grouped_mm"), ids=str)
@settings(max_examples=25)
@given(p=PROBLEMS, formats=st.sampled_from(PAIRS), dtype=st.sampled_from(list(DTYPES.values())), seed=st.integers(0, 999))
def test_within_the_bound_of_fp64(backend, p, formats, dtype, seed):
    a, b = random_operands(p, formats, seed)
    y = grouped_mm(backend, a, b, p.offs, dtype)
    assert_within_bound(y, *products(a, b, p.offs, p.rows), p.contraction)
    assert not y[p.rows - p.past :].any()


@pytest.mark.parametrize("backend", backends_for("grouped_mm_wgrad"), ids=str)
@settings(max_examples=25)
@given(p=PROBLEMS, format=st.sampled_from(OPERAND_FORMATS), dtype=st.sampled_from([torch.float32, BF16]), seed=st.integers(0, 999))
@example(p=Problem((0, 5), 64, 64), format="nvfp4", dtype=torch.float32, seed=0)  # an empty group's gradient is written
def test_wgrad_within_the_bound_of_fp64(backend, p, format, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    a, padded = column_operand(torch.randn(p.rows, p.outputs, generator=g), format, p.offs)
    b, _ = column_operand(torch.randn(p.rows, p.contraction, generator=g), format, p.offs)
    exact, size = wgrad_products(a, b, p.offs, padded)
    y = wgrad(backend, a, b, p.offs, padded, dtype)
    assert_within_bound(y, exact, size, max(p.sizes))
    empty = torch.tensor(p.sizes) == 0
    assert not y[empty].any()

    old = torch.randn(y.shape, generator=g).to(dtype)
    summed = wgrad(backend, a, b, p.offs, padded, out=old)
    assert_within_bound(summed, old.double() + exact, size + old.double().abs(), max(p.sizes) + 1)
    assert_same_bits(summed[empty], old[empty])


def scales_past_bf16(lines, blocks, seed):
    """Scale bytes (lines, blocks) of a and of b: most ordinary, some far outside what BF16 can hold, products near 1."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randint(120, 134, (lines, blocks), generator=g)
    extreme = torch.tensor([0, 1, 2, 9, 10, 16, 17, 237, 239, 240, 246, 247, 252])[torch.randint(13, (1, blocks), generator=g)]
    return torch.where((torch.rand(lines, 1, generator=g) < 0.3), extreme, a).to(torch.uint8), extreme


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "mxfp4"])
@pytest.mark.parametrize("which", ["rows", "panels", "both"])
def test_scales_outside_the_exact_range_of_bf16(backend, format, which):
    p = Problem((7, 0, 40), 70, 128, past=1)
    fmt = FORMATS[format]
    g = torch.Generator().manual_seed(3)
    limit = {"e4m3": 0x39, "e5m2": 0x3D, "e2m1": 3}[fmt.element]  # magnitudes up to 1, so that nothing overflows
    width = p.contraction * fmt.bits // 8

    def elements(*shape):
        codes, sign = torch.randint(limit, shape, generator=g), torch.randint(2, shape, generator=g) << (fmt.bits - 1)
        codes = codes | sign
        return (codes if fmt.bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).view(fmt.values_dtype)

    wide_a, extreme = scales_past_bf16(p.rows, 4, 5)
    wide_b, _ = scales_past_bf16(3 * p.outputs, 4, 6)
    wide_b = wide_b.view(3, p.outputs, 4)
    usual_a, usual_b = torch.full_like(wide_a, 127), torch.full_like(wide_b, 127)
    usual_b[1:] = (254 - extreme.clamp(min=10)).to(torch.uint8)  # what brings a wide row of a back to about 1
    scales = {"rows": (wide_a, usual_b), "panels": (usual_a, wide_b), "both": (wide_a, wide_b)}[which]
    a = (elements(p.rows, p.contraction), scales[0], None, format)
    b = (elements(3, p.outputs, p.contraction), scales[1], None, format)
    assert a[0].shape[-1] == width
    y = grouped_mm(backend, a, b, p.offs, torch.float32)
    exact, size = products(a, b, p.offs, p.rows)
    fits = size < 2.0**120
    assert fits.any()
    assert_within_bound(y[fits], exact[fits], size[fits], p.contraction)
    for rows in (torch.arange(0, 7), torch.tensor([3]), torch.arange(6, -1, -1)):  # wide rows do not change their neighbours
        alone = grouped_mm(backend, rows_of(a, rows), b, torch.tensor([len(rows)] * 3).int(), torch.float32)
        if backend.name == "host":
            assert_same_bits(alone, y[rows])


def test_zero_blocks_take_any_scale_byte(backend):
    p = Problem((9,), 66, 96)
    a, b = random_operands(p, ("mxfp8", "mxfp8"))
    for t in (a[0], b[0][0]):
        t.view(torch.uint8)[::3, 32:64] = 0
    expected = grouped_mm(backend, a, b, p.offs)
    for byte in (0, 9, 247, 254):
        for t in (a[1], b[1][0]):
            t.view(torch.uint8)[::3, 1] = byte
        assert_same_bits(grouped_mm(backend, a, b, p.offs), expected)


@pytest.mark.parametrize("rows", [3, 40])
def test_every_block_scale_of_nvfp4(backend, rows):
    p = Problem((rows,), 70, 16 * 254)
    a, b = random_operands(p, ("nvfp4", "nvfp4"))
    finite = torch.tensor([s for s in range(256) if s & 127 != 127], dtype=torch.uint8)  # negative, subnormal and zero ones too
    for t, shift in ((a[1], 1), (b[1][0], 3)):
        for line in range(t.shape[0]):
            t.view(torch.uint8)[line] = finite.roll(shift * line)
    for signs in (finite, finite & 127):  # a panel without negative scales, and one with
        b[1].view(torch.uint8)[0, 65] = signs
        y = grouped_mm(backend, a, b, p.offs, torch.float32)
        assert_within_bound(y, *products(a, b, p.offs, p.rows), p.contraction)
    b[1].view(torch.uint8)[:] &= 127
    a[1].view(torch.uint8)[:] &= 127
    y = grouped_mm(backend, a, b, p.offs, torch.float32)
    assert_within_bound(y, *products(a, b, p.offs, p.rows), p.contraction)


@pytest.mark.parametrize("format", FORMATS)
def test_a_nan_stays_in_its_row_or_column(backend, format):
    p = Problem((5, 70), 66, 96)
    nan_scale = 0x7F if format == "nvfp4" else 0xFF
    for part in ("element", "scale", "global"):
        if (part == "element" and FORMATS[format].bits == 4) or (part == "global" and format != "nvfp4"):
            continue
        a, b = random_operands(p, (format, format))
        clean = grouped_mm(backend, a, b, p.offs)
        tensor = {"element": 0, "scale": 1, "global": 2}[part]
        value = {"element": 0x7F, "scale": nan_scale, "global": NAN}[part]
        raw = [t if part == "global" else t.view(torch.uint8) for t in (a[tensor], b[tensor])]
        raw[0][(2, 1)[: raw[0].ndim]] = value
        raw[1][(1, 7, 2)[: raw[1].ndim]] = value
        y = grouped_mm(backend, a, b, p.offs)
        hit = torch.zeros_like(y, dtype=torch.bool)
        hit[2], hit[5:, 7] = True, True
        assert torch.equal(y.isnan(), hit)
        assert_within_bound(y[~hit].float(), clean[~hit].double(), clean[~hit].double().abs() * 2**14, 96)


@pytest.mark.parametrize("format", OPERAND_FORMATS)
@pytest.mark.parametrize("host", HOST, ids=str)
def test_a_row_does_not_depend_on_its_batch(host, format):
    p = Problem((13, 0, 130, 1), 70, 160, past=2)
    a, b = random_operands(p, (format, format))
    y = grouped_mm(host, a, b, p.offs)
    for e, (start, end) in enumerate(((0, 13), (13, 13), (13, 143), (143, 144))):
        alone = tuple(None if t is None else t[e : e + 1] for t in b[:3]) + (format,)  # noqa: RUF005
        order = torch.randperm(end - start) + start
        for rows in (order, order[:1], order[1:8], order[::2]):
            assert_same_bits(grouped_mm(host, rows_of(a, rows), alone, torch.tensor([len(rows)]).int()), y[rows])
    for threads in (1, 2, 3):
        with num_threads(threads):
            assert_same_bits(grouped_mm(host, a, b, p.offs), y)


@pytest.mark.parametrize("host", HOST, ids=str)
def test_a_long_contraction_is_cut_into_blocks_without_a_trace(host):
    p = Problem((9, 200), 66, 9001)  # more than two blocks of a panel
    for formats in (("bf16", "bf16"), ("mxfp8", "mxfp8"), ("fp32", "fp32")):
        a, b = random_operands(p, formats)
        y = grouped_mm(host, a, b, p.offs, torch.float32)
        assert_within_bound(y, *products(a, b, p.offs, p.rows), p.contraction)
        one = grouped_mm(host, rows_of(a, torch.tensor([200])), b, torch.tensor([0, 1]).int(), torch.float32)
        assert_same_bits(one, y[200:201])


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16", "mxfp8", "mxfp8_e5m2"])
def test_memory_layout_does_not_matter(backend, format):
    p = Problem((7, 64, 66), 100, 95, past=1)
    a, b = random_operands(p, (format, format))
    y = grouped_mm(backend, a, b, p.offs)
    spread = torch.empty(*b[0].shape[:2], 2 * p.contraction, dtype=b[0].dtype)[..., ::2]
    spread.view(torch.uint8 if spread.element_size() == 1 else spread.dtype).copy_(
        b[0].view(torch.uint8) if spread.element_size() == 1 else b[0]
    )
    for a_values in (a[0], line_major(a[0])):
        for b_values in (b[0], line_major(b[0]), spread):
            got = grouped_mm(backend, (a_values, *a[1:]), (b_values, *b[1:]), p.offs)
            if backend.name == "host":
                assert_same_bits(got, y)
            else:
                torch.testing.assert_close(got, y, rtol=2**-7, atol=2**-7)


def test_bias_and_accumulator_are_rounded_once(backend):
    a, b = operand(torch.ones(3, 256), "bf16"), operand(torch.ones(2, 65, 256), "bf16")
    bias = torch.tensor([[1.0], [-255.5]]).expand(2, 65).contiguous()  # 257 is not a BF16 number: to even, 256
    y = grouped_mm(backend, a, b, torch.tensor([2, 3]).int(), BF16, bias)
    assert y[:2].unique().tolist() == [256.0]
    assert y[2].unique().tolist() == [0.5]


def test_flush_to_zero_in_the_caller_changes_nothing(backend):
    a, b = operand(torch.full((2, 4), 2.0**-70), "fp32"), operand(torch.full((1, 3, 4), 2.0**-70), "fp32")
    with flushed_subnormals():
        y = grouped_mm(backend, a, b, torch.tensor([2]).int(), torch.float32)
    if backend.name == "host":
        assert y.view(torch.int32).unique().tolist() == [1 << 11]  # 4 * 2^-140, a subnormal


def test_g01_wgrad_without_tokens_is_zero(backend):
    x, dy, offs = torch.empty(0, 256, dtype=BF16), torch.empty(0, 224, dtype=BF16), torch.zeros(4, dtype=torch.int32)
    dw = ops.grouped_mm_wgrad(dy, x, offs, backend=backend.name)
    assert torch.equal(dw, torch.zeros(4, 224, 256))
    assert ops.grouped_mm(x, torch.ones(4, 224, 256, dtype=BF16), offs, backend=backend.name).shape == (0, 224)


@pytest.mark.parametrize("sizes", [(5, 3, 0), (0, 0, 0)])
def test_g03_last_group_empty(backend, sizes):
    p = Problem(sizes, 48, 32)
    a, b = random_operands(p, ("bf16", "bf16"))
    assert_within_bound(grouped_mm(backend, a, b, p.offs), *products(a, b, p.offs, p.rows), 32)
    (dy, _), (x, _) = (column_operand(torch.randn(p.rows, n), "bf16", p.offs) for n in (48, 32))
    assert not wgrad(backend, dy, x, p.offs, False)[2].any()


@pytest.mark.parametrize("formats", [("mxfp8", "nvfp4"), ("mxfp8_e5m2", "mxfp4"), ("mxfp4", "mxfp8")], ids=str)
@pytest.mark.parametrize("outputs", [1, 8, 9])  # few lines of a, which lie across the contraction
def test_wgrad_of_mixed_formats_with_few_outputs(backend, formats, outputs):
    p = Problem((40, 0, 3), outputs, 37)
    (dy, padded), (x, _) = (
        column_operand(torch.randn(p.rows, width), format, p.offs) for width, format in zip((outputs, 37), formats, strict=True)
    )
    assert_within_bound(wgrad(backend, dy, x, p.offs, padded), *wgrad_products(dy, x, p.offs, padded), 40)


@pytest.mark.parametrize("format", ["bf16", "mxfp8"])
def test_g05_wgrad_of_experts_with_few_tokens(backend, format):
    offs = torch.tensor([1, 0, 3, 124]).cumsum(0).int()
    (dy, padded), (x, _) = (column_operand(torch.randn(128, n), format, offs) for n in (64, 128))
    dw = wgrad(backend, dy, x, offs, padded)
    assert_within_bound(dw, *wgrad_products(dy, x, offs, padded), 124)
    assert not dw[1].any()


@pytest.mark.parametrize("offs", [[4, 2, 8], [-1, 4, 8], [2, 4, 9]])
def test_g07_bad_offsets_are_refused(backend, offs):
    a, b = torch.ones(8, 4), torch.ones(3, 5, 4)
    with pytest.raises(ValueError, match="offs"):
        ops.grouped_mm(a, b, torch.tensor(offs).int(), backend=backend.name)


@pytest.mark.parametrize("sizes", [(1, 2, 3, 30), (1, 2, 3, 130)])
@pytest.mark.parametrize("format", ["bf16", "mxfp8", "nvfp4"])
def test_g09_small_and_ragged_groups(backend, sizes, format):
    p = Problem(sizes, 96, 256)
    a, b = random_operands(p, (format, format))
    assert_within_bound(grouped_mm(backend, a, b, p.offs), *products(a, b, p.offs, p.rows), 256)


def test_g11_output_with_the_expert_innermost(backend):
    x, w = torch.randn(6, 16), torch.randn(3, 8, 16)
    w[1] = NAN
    offs = torch.tensor([2, 4, 6]).int()
    with pytest.raises(ValueError, match="out must be contiguous"):
        ops.grouped_mm(x, w, offs, out=torch.empty(8, 6).T, backend=backend.name)
    out = torch.empty(8, 6).T  # the backend itself takes it
    backend.run("grouped_mm", operand(x, "fp32"), operand(w, "fp32"), offs, None, out)
    assert out[2:4].isnan().all()
    for e, rows in ((0, slice(0, 2)), (2, slice(4, 6))):
        torch.testing.assert_close(out[rows], x[rows] @ w[e].T)


@pytest.mark.parametrize("host", HOST, ids=str)
def test_g13_a_hundred_calls_give_the_same_bytes(host):
    p = Problem((17, 0, 40, 7), 72, 64)
    a, b = random_operands(p, ("bf16", "bf16"))
    other = random_operands(Problem((90,), 40, 33), ("fp32", "fp32"))
    y = grouped_mm(host, a, b, p.offs)
    for _ in range(100):
        grouped_mm(host, *other, torch.tensor([90]).int(), torch.float32)
        assert_same_bits(grouped_mm(host, a, b, p.offs), y)


def test_g15_odd_row_strides_and_offsets(backend):
    base, w, offs = torch.randn(64, 65).to(BF16), torch.randn(2, 32, 64).to(BF16), torch.tensor([30, 64]).int()
    x = base[:, 1:65]
    dense = ops.grouped_mm(x.contiguous(), w, offs, backend=backend.name)
    assert_same_bits(ops.grouped_mm(x, w, offs, backend=backend.name), dense)
    assert_same_bits(grouped_mm(backend, (x, None, None, "bf16"), (w, None, None, "bf16"), offs), dense)


def test_g17_sums_are_not_kept_in_16_bits(backend):
    a, b = operand(torch.ones(3, 4096), "bf16"), operand(torch.ones(1, 5, 4096), "bf16")
    assert grouped_mm(backend, a, b, torch.tensor([3]).int()).unique().tolist() == [4096.0]
    a, b = operand(torch.randn(3, 4096), "bf16"), operand(torch.randn(1, 5, 4096), "bf16")
    y = grouped_mm(backend, a, b, torch.tensor([3]).int())
    for _ in range(20):
        assert_same_bits(grouped_mm(backend, a, b, torch.tensor([3]).int()), y)


@pytest.mark.parametrize("host", HOST, ids=str)
def test_g19_offsets_of_more_than_31_bits(host):
    stride = 2**30  # elements; the memory between the rows is never touched
    x = torch.empty(3 * stride, dtype=BF16).as_strided((3, 32), (stride, 1)).fill_(1.0)
    out = torch.empty(3 * stride, dtype=BF16).as_strided((3, 16), (stride, 1))
    w = operand(torch.arange(1.0, 3.0)[:, None, None].expand(2, 16, 32), "bf16")
    host.run("grouped_mm", (x, None, None, "bf16"), w, torch.tensor([2, 3]).int(), None, out)
    assert out.unique(dim=1).flatten().tolist() == [32.0, 32.0, 64.0]


@pytest.mark.slow
def test_g19_four_gigabytes_of_output():
    rows, outputs = 131073, 16384
    x, w = torch.zeros(rows, 32, dtype=BF16), torch.ones(2, outputs, 32, dtype=BF16)
    x[-1] = 1
    y = ops.grouped_mm(x, w, torch.tensor([rows - 1, rows]).int())
    assert y[-1].unique().tolist() == [32.0]
    assert not y[-2].any()


def test_g21_groups_without_rows_quantized_and_multiplied(backend):
    offs = torch.tensor([0, 32, 32, 96]).int()
    x, w = torch.randn(96, 64).to(BF16), torch.randn(4, 48, 64).to(BF16)
    a, b = (mxmoe.quantize(t, "mxfp8", backend="reference") for t in (x, w))
    column = [mxmoe.quantize(t, "mxfp8", "column", offs=offs, backend="reference") for t in (torch.randn(96, 48), x)]
    y = ops.grouped_mm(a, b, offs, backend=backend.name)
    dw = ops.grouped_mm_wgrad(*column, offs, backend=backend.name)
    for e, rows in ((1, slice(0, 32)), (3, slice(32, 96))):
        exact = (a.dequantize()[rows].double() @ b.dequantize()[e].double().T).float()
        torch.testing.assert_close(y[rows].float(), exact, rtol=2**-7, atol=1e-5)
    assert not dw[0].any()
    assert not dw[2].any()
    assert math.isfinite(dw.sum().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_linear_reads_16_bits_exactly(dtype):
    dy = torch.randn(37, 5)
    x, w = torch.randn(37, 129).to(dtype), torch.randn(5, 129).to(dtype)
    results = []
    for tokens, weight in ((x, w), (x, w.float()), (x.float(), w.float())):
        leaves = tokens.clone().requires_grad_(), weight.clone().requires_grad_()
        y = mxmoe.linear(*leaves, recipe="fp32", out_dtype=torch.float32)
        y.backward(dy)
        results.append((y, *(leaf.grad.to(dtype) for leaf in leaves)))
    for narrow, *wide in zip(*results, strict=True):
        assert all(torch.equal(narrow, t) for t in wide)
