"""The pool of large results: blocks are reused, never shared by two living tensors, and bounded."""

import copy
import io
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxmoe
from mxmoe.memory import empty

MIB = 2**20
LIKE = torch.zeros(1)


def block(mib: int, backend: str = "host") -> torch.Tensor:
    return empty((mib, MIB), torch.uint8, LIKE, backend)


@pytest.fixture(autouse=True)
def own_pool():
    mxmoe.empty_cache()
    yield
    mxmoe.empty_cache()


def test_a_dropped_result_serves_the_next_of_its_size():
    first = block(8)
    address = first.data_ptr()
    view = first[3:]
    del first
    assert block(8).data_ptr() != address  # a view keeps its block
    del view
    assert block(8).data_ptr() == address


def test_a_block_is_put_together_from_the_pages_of_kept_ones():
    pieces = [block(4).fill_(7) for _ in range(10)]
    peak = mxmoe.memory_stats().peak
    del pieces
    whole = block(40)
    assert int((whole == 7).sum()) >= 35 * MIB  # an eighth of 40 MiB may be fresh
    whole.fill_(9)
    assert block(4).shape == (4, MIB)
    assert bool((whole == 9).all())
    assert mxmoe.memory_stats().peak - peak <= 4 * MIB


def test_small_results_stay_with_torch():
    before = mxmoe.memory_stats()
    small = empty((1000,), torch.float32, LIKE, "host")
    assert mxmoe.memory_stats() == before
    assert small.shape == (1000,)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), ()])
def test_empty_shapes(shape):
    assert empty(shape, torch.bfloat16, LIKE, "host").shape == torch.Size(shape)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32, torch.uint8])
def test_a_result_is_an_ordinary_tensor(dtype):
    t = empty((3, 5, MIB // 4), dtype, LIKE, "host")
    assert (t.dtype, t.shape, t.stride()) == (dtype, (3, 5, MIB // 4), (5 * MIB // 4, MIB // 4, 1))
    assert not t._is_view()
    assert t.is_leaf
    assert t.data_ptr() % 64 == 0
    assert t.untyped_storage().nbytes() == t.nbytes
    t.view(torch.uint8).copy_(torch.randint(0, 255, t.view(torch.uint8).shape, dtype=torch.uint8))
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    for other in (copy.deepcopy(t), torch.load(file, weights_only=True), t.clone()):
        assert other.data_ptr() != t.data_ptr()
        assert torch.equal(other.view(torch.uint8), t.view(torch.uint8))


def test_stats_count_living_and_kept_bytes():
    before = mxmoe.memory_stats().in_use
    a, b = block(4), block(6)
    stats = [mxmoe.memory_stats()]
    del a
    stats.append(mxmoe.memory_stats())
    mxmoe.empty_cache()
    stats.append(mxmoe.memory_stats())
    assert b.shape == (6, MIB)
    expected = [(10, 0, 10), (6, 4, 10), (6, 0, 6)]
    assert [(s.in_use - before, s.kept, s.peak - before) for s in stats] == [tuple(n * MIB for n in s) for s in expected]


@settings(max_examples=40)
@given(steps=st.lists(st.one_of(st.integers(2, 24), st.tuples(st.integers(0, 99))), max_size=40))
def test_living_results_never_share_memory_and_the_pool_keeps_its_bound(steps):
    mxmoe.empty_cache()
    before, living, largest = mxmoe.memory_stats().in_use, [], 0
    for step in steps:
        if isinstance(step, tuple):
            if living:
                del living[step[0] % len(living)]
        else:
            living.append(block(step))
        ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in living)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        stats = mxmoe.memory_stats()
        largest = max(largest, stats.in_use)
        used = sum(t.nbytes for t in living)
        assert used <= stats.in_use - before <= 1.25 * used + 2 * MIB * len(living)
        assert stats.peak == largest
        assert stats.in_use + stats.kept <= max(largest * 9 // 8, stats.in_use)


def test_a_step_that_repeats_takes_no_fresh_memory():
    x, w = torch.randn(1024, 1024).bfloat16(), torch.randn(4, 1024, 1024).bfloat16()
    weights = [w.requires_grad_(), torch.randn(4, 1024, 512).bfloat16().requires_grad_()]
    router = torch.randn(4, 1024).bfloat16()

    def step():
        mxmoe.moe_layer(x, router, *weights, top_k=2, recipe="mxfp8")[0].sum().backward()
        for p in weights:
            p.grad = None

    in_use = mxmoe.memory_stats().in_use
    step()
    step()
    before = mxmoe.memory_stats()
    step()
    assert mxmoe.memory_stats() == before
    assert before.in_use == in_use


def test_the_reference_uses_torchs_own_memory():
    before = mxmoe.memory_stats()
    held = block(8, "reference")
    assert mxmoe.memory_stats() == before
    assert held.numel() == 8 * MIB


def test_what_cannot_be_had_is_an_error_and_counts_as_nothing():
    before = mxmoe.memory_stats()
    with pytest.raises(MemoryError, match="no memory for a result of 4611686018427387904 bytes"):
        empty((2**62,), torch.uint8, LIKE, "host")
    assert mxmoe.memory_stats() == before


def test_a_default_device_changes_nothing():
    with torch.device("meta"):
        assert block(4).device.type == "cpu"


def test_results_may_outlive_the_interpreter():
    code = "import mxmoe, torch; keep = mxmoe.quantize(torch.randn(2048, 4096), 'mxfp8'); import builtins; builtins.keep = keep"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr == ""
