"""Padded groups and the blocked scale layout: the index functions, and swizzle_scales on each backend."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxmoe
from mxmoe import layout
from mxmoe.formats import FORMATS
from tests.helpers import FORMAT_NAMES, backend_fixture, backends_for, scales_of

backend = backend_fixture("swizzle_scales")
BACKENDS = backends_for("swizzle_scales")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def with_scales(backend, shape, format="mxfp8", axis="row", offs=None):
    """A copy whose scale bytes are 1..255 in turn, so that a misplaced one shows."""
    t = backend.quantize(torch.zeros(shape), format, axis, offs=offs, scope="tensor")
    scales_of(t).copy_((torch.arange(t.scales.numel()) % 255 + 1).view(t.scales.shape))
    return t


def test_offsets_from_sizes_and_indptr():
    assert layout.offs_from_sizes(int32(3, 0, 2)).tolist() == [3, 3, 5]
    assert layout.offs_from_indptr(int32(0, 3, 3, 5)).tolist() == [3, 3, 5]
    assert layout.offs_from_sizes(torch.tensor([1, 2])).dtype == torch.int32


@settings(max_examples=50)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=12))
def test_padded_groups(sizes):
    offs = layout.offs_from_sizes(int32(*sizes))
    padded = [-(-m // 128) * 128 for m in sizes]
    assert layout.padded_sizes(offs).tolist() == padded
    assert layout.padded_starts(offs).tolist() == [sum(padded[:g]) for g in range(len(sizes))]
    bound = layout.padded_rows(sum(sizes), len(sizes))
    assert sum(padded) <= bound <= sum(sizes) + 127 * len(sizes)
    assert bound % 128 == 0


def test_q29_blocked_offsets():
    assert [layout.blocked_offset(*position, 3) for position in ((33, 2), (99, 0))] == [22, 60]
    assert layout.blocked_offset(130, 5, 8) == 1569
    assert layout.blocked_position(1569, 8) == (130, 5)


@pytest.mark.parametrize(("lines", "blocks"), [(1, 1), (100, 3), (128, 4), (130, 5), (300, 9)])
def test_blocked_offset_is_invertible(lines, blocks):
    size = layout.blocked_bytes(lines, blocks)
    assert size % 512 == 0
    offsets = torch.arange(size)
    line, block = layout.blocked_position(offsets, blocks)
    assert torch.equal(layout.blocked_offset(line, block, blocks), offsets)
    inside = (line < lines) & (block < blocks)
    assert inside.sum() == lines * blocks


def test_q29_padding_is_zero_whatever_the_memory_held(backend):
    t = with_scales(backend, (100, 96))
    first, second = backend.swizzle(t), backend.swizzle(t)
    assert torch.equal(first, second)
    assert first.shape == (512,)
    offsets = layout.blocked_offset(torch.arange(100)[:, None], torch.arange(3), 3)
    assert torch.equal(first[offsets], scales_of(t))
    padding = torch.ones(512, dtype=torch.bool)
    padding[offsets.flatten()] = False
    assert padding.sum() == 212
    assert (first[padding] == 0).all()


@pytest.mark.parametrize("shape", [(1, 1), (130, 160), (300, 33), (2, 129, 300), (0, 64), (5, 0), (0, 8, 32)])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("axis", ["row", "column"])
def test_swizzle_equals_torchaos_and_round_trips(backend, shape, format, axis):
    from torchao.prototype.mx_formats.utils import to_blocked

    t = with_scales(backend, shape, format, axis)
    blocked = backend.swizzle(t)
    assert torch.equal(backend.unswizzle(t, blocked), scales_of(t))
    if t.scales.numel():
        stacked = scales_of(t).reshape(-1, *t.scales.shape[-2:])
        for matrix, got in zip(stacked, blocked.reshape(len(stacked), -1), strict=True):
            assert torch.equal(got, to_blocked(matrix).flatten())


@settings(max_examples=30)
@given(st.sampled_from(BACKENDS), st.sampled_from(["mxfp8", "nvfp4"]), st.lists(st.integers(0, 200), min_size=1, max_size=5))
def test_grouped_row_copy(backend, format, sizes):
    """Group g is a blocked matrix of its own at line padded_starts[g]; what no group owns is 0."""
    offs = layout.offs_from_sizes(int32(*sizes))
    rows = sum(sizes) + 3
    t = with_scales(backend, (rows, 80), format, offs=offs)
    blocks = t.scales.shape[1]
    blocked = backend.swizzle(t)
    line_bytes = -(-blocks // 4) * 4
    assert blocked.shape == (layout.padded_rows(rows, len(sizes)) * line_bytes,)
    owned = torch.zeros_like(blocked, dtype=torch.bool)
    for start, first, end in zip(layout.padded_starts(offs).tolist(), [0, *offs.tolist()], offs.tolist(), strict=False):
        own = start * line_bytes + layout.blocked_offset(torch.arange(end - first)[:, None], torch.arange(blocks), blocks)
        assert torch.equal(blocked[own], scales_of(t)[first:end])
        owned[own.flatten()] = True
    assert (blocked[~owned] == 0).all()
    back = backend.unswizzle(t, blocked)
    assert torch.equal(back[: offs[-1]], scales_of(t)[: offs[-1]])
    assert (back[offs[-1] :] == 0).all()


@settings(max_examples=30)
@given(st.sampled_from(BACKENDS), st.sampled_from(FORMAT_NAMES), st.lists(st.integers(0, 200), min_size=1, max_size=5))
def test_grouped_column_copy(backend, format, sizes):
    """Each group's scales are a blocked matrix of their own, one after the other."""
    block = FORMATS[format].block
    offs = layout.offs_from_sizes(int32(*sizes))
    t = with_scales(backend, (sum(sizes) + 3, 70), format, "column", offs)
    blocked = backend.swizzle(t)
    at, used = 0, 0
    for size in layout.padded_sizes(offs).tolist():
        blocks = size // block
        own = scales_of(t)[:, at // block : at // block + blocks]
        offsets = layout.blocked_offset(torch.arange(70)[:, None], torch.arange(blocks), blocks) + used
        assert torch.equal(blocked[offsets], own)
        at, used = at + size, used + layout.blocked_bytes(70, blocks)
    assert blocked.count_nonzero() == 70 * at // block
    back = backend.unswizzle(t, blocked)
    assert torch.equal(back[:, : at // block], scales_of(t)[:, : at // block])
    assert (back[:, at // block :] == 0).all()


def test_documented_examples():
    """The numbers of docs/layouts.md."""
    offs = int32(20, 20, 160)
    assert layout.padded_rows(170, 3) == 512
    assert layout.padded_starts(offs).tolist() == [0, 128, 128]
    assert layout.padded_sizes(offs).tolist() == [128, 0, 256]
    first_bytes = [layout.blocked_position(offset, 4) for offset in range(16)]
    assert first_bytes == [(line, block) for line in (0, 32, 64, 96) for block in range(4)]


def test_p07_a_column_copy_holds_every_row_of_its_group():
    x = torch.randn(4, 40)
    copy = mxmoe.quantize(x, "mxfp8", "column", offs=torch.tensor([4], dtype=torch.int32))
    alone = mxmoe.quantize(x, "mxfp8", "column")
    values, scales = copy.values.view(torch.uint8), copy.scales.view(torch.uint8)
    assert torch.equal(values[:4], alone.values.view(torch.uint8))
    assert (values[4:] == 0).all()
    assert torch.equal(scales[:, :1], alone.scales.view(torch.uint8))
    assert (scales[:, 1:] == 0).all()
    assert torch.equal(mxmoe.dequantize(copy), mxmoe.dequantize(alone))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
def test_p15_transposed_scales_read_like_contiguous_ones(format):
    x, w, offs = torch.randn(6, 64), torch.randn(2, 32, 64), torch.tensor([2, 6], dtype=torch.int32)
    a, b = mxmoe.quantize(x, format), mxmoe.quantize(w, format)
    turned = a.replace(scales=a.scales.t().contiguous().t()), b.replace(scales=b.scales.mT.contiguous().mT)
    assert not turned[0].scales.is_contiguous()
    assert torch.equal(mxmoe.grouped_mm(*turned, offs), mxmoe.grouped_mm(a, b, offs))
    for plain, strided in zip((a, b), turned, strict=True):
        assert torch.equal(strided.dequantize(), plain.dequantize())
        blocked = [mxmoe.swizzle_scales(t).scales.view(torch.uint8) for t in (plain, strided)]
        assert torch.equal(*blocked)
