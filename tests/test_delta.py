"""Differences of two versions of a tensor: exact, reversible, checked; values against NumPy."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxmoe import delta
from mxmoe.backends.host import use_isa
from mxmoe.backends.host.extension import _C

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.int32,
]
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def bits(t: torch.Tensor) -> np.ndarray:
    return t.reshape(-1).view(torch.uint8).numpy().view(BITS[t.element_size()])


def from_bits(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    t = torch.empty(array.shape, dtype=dtype)
    t.view(torch.uint8).numpy()[:] = array.view(np.uint8)
    return t


def two_versions(dtype, numel, density, seed):
    """Random bit patterns, and a copy where about `density` of the elements have others."""
    width = torch.empty(0, dtype=dtype).element_size()
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 256**width, numel, dtype=BITS[width], endpoint=False)
    after = np.where(rng.random(numel) < density, rng.integers(0, 256**width, numel, dtype=BITS[width]), before)
    return from_bits(before, dtype), from_bits(after, dtype)


@settings(max_examples=80)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(
        [0, 1, 31, 63, 64, 65, 254, 255, 256, 1000, delta.CHUNK - 1, delta.CHUNK, delta.CHUNK + 1, 3 * delta.CHUNK + 77]
    ),
    st.sampled_from([0.0, 1e-5, 1e-3, 0.02, 0.5, 1.0]),
    st.integers(0, 2**31),
    st.sampled_from(_C.isas()),
    st.booleans(),
)
def test_a_delta_leads_there_and_back(dtype, numel, density, seed, isa, nibbles):
    before, after = two_versions(dtype, numel, density, seed)
    order = "nibbles" if nibbles and before.element_size() == 1 else None
    with use_isa(isa):
        found = delta.diff(before, after, order)
        changed = np.flatnonzero(bits(before) != bits(after))
        assert np.array_equal(delta.positions(found).numpy(), changed)
        target = before.clone()
        delta.apply(target, found)
        assert np.array_equal(bits(target), bits(after))
        delta.apply(target, found, backwards=True)
        assert np.array_equal(bits(target), bits(before))
    portable = delta.diff(before, after, order)
    assert all(torch.equal(getattr(portable, f), getattr(found, f)) for f in ("changes", "gap_bytes", "gaps", "steps"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_neighbouring_values_are_one_step_apart(dtype):
    """torch.nextafter, or the sorted values of a byte, say which are neighbours."""
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
        values = values[~values.float().isnan()]
        values = values[(values.float() + values.view(torch.uint8).lt(128) * 1e-9).argsort(stable=True)]  # -0 before 0
        low, high = values[:-1].contiguous(), values[1:].contiguous()
    else:
        low = torch.tensor([-2.5, -1.0, -1e-3, 1e-3, 1.0, 1.5, 300.0]).to(dtype)
        high = torch.nextafter(low, torch.full_like(low, torch.inf))
    up, down = delta.diff(low, high), delta.diff(high, low)
    assert up.steps[0].tolist() == [1] * low.numel()  # zigzag 2 of +1, less one
    assert down.steps[0].tolist() == [0] * low.numel()  # zigzag 1 of -1, less one
    assert not up.steps[1:].any()
    assert not down.steps[1:].any()


def test_steps_of_nibbles_are_those_of_their_values():
    """E2M1 codes by value: -6 ... -0, 0 ... 6."""
    codes = [15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7]
    for low, high in pairwise(codes):
        for kept in (0, 9):
            before = torch.tensor([[low << 4 | kept], [kept << 4 | low]], dtype=torch.uint8)
            after = torch.tensor([[high << 4 | kept], [kept << 4 | high]], dtype=torch.uint8)
            assert delta.diff(before, after, "nibbles").steps.tolist() == [[0x10, 0x01]]


def test_long_gaps_take_bytes_of_255():
    before = torch.zeros(1000, dtype=torch.bfloat16)
    after = before.clone()
    after[[254, 254 + 256, 999]] = 1.0
    found = delta.diff(before, after)
    assert found.gaps.tolist() == [254, 255, 0, 255, 488 - 255]


def test_a_delta_of_another_tensor_changes_nothing():
    before, after = two_versions(torch.bfloat16, 1000, 0.1, 0)
    found = delta.diff(before, after)
    spoiled = [
        dataclasses.replace(found, gaps=found.gaps[:-1]),
        dataclasses.replace(found, steps=found.steps[:1]),
        dataclasses.replace(found, gaps=torch.full_like(found.gaps, 254)),  # past the end
        dataclasses.replace(found, gaps=torch.full_like(found.gaps, 255)),  # an escape at the end
        dataclasses.replace(found, changes=found.changes - 1),
        dataclasses.replace(found, gap_bytes=torch.tensor([-1], dtype=torch.int32)),
        dataclasses.replace(found, changes=found.changes.repeat(2)),
        dataclasses.replace(found, order="nibbles"),
    ]
    for each in spoiled:
        target = before.clone()
        with pytest.raises(ValueError, match=r"delta|nibbles"):
            delta.apply(target, each)
        assert np.array_equal(bits(target), bits(before))
    for target in (
        torch.zeros(1000),
        torch.zeros(delta.CHUNK + 1, dtype=torch.bfloat16),
        torch.zeros(500, 2, dtype=torch.bfloat16).t(),
    ):
        with pytest.raises(ValueError, match=r"target|delta"):
            delta.apply(target, found)


@pytest.mark.parametrize(
    ("before", "after", "order", "error", "message"),
    [
        (torch.zeros(4), torch.zeros(5), None, ValueError, r"after must be float32 of shape \(4,\)"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), None, ValueError, "after must be float32"),
        (torch.zeros(4, 4).t(), torch.zeros(4, 4), None, ValueError, "before must be contiguous"),
        (torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), None, TypeError, "before must be .* got int64"),
        (torch.zeros(4), torch.zeros(4), "nibbles", ValueError, "bytes that hold two values"),
        (torch.zeros(4), torch.zeros(4), "xor", ValueError, "order must be one of"),
        ([1.0], torch.zeros(1), None, TypeError, "before must be a torch.Tensor, got list"),
        (torch.zeros(1, device="meta"), torch.zeros(1), None, ValueError, "on the CPU"),
    ],
)
def test_errors_name_argument_expected_and_got(before, after, order, error, message):
    with pytest.raises(error, match=message):
        delta.diff(before, after, order)
