"""Differences of two versions of a tensor, exact to the bit: where elements changed, and by how many steps.

After a small optimiser step most weights keep their bits, and those that change move to a neighbouring value. A `Delta` holds, per
changed element in order, the number of unchanged ones before it (`gaps`: bytes; 255 stands for 255 and more to come) and the signed
number of representable values between old and new, zigzag-coded less one, in byte planes (`steps`). Both planes hold few distinct
bytes, so that a general compressor comes close to their entropy. Every 131,072 elements start anew and run on their own thread.

Orders of the representable values: `sign_magnitude` of floats (BF16, FP16, FP32, FP8; -0 is the neighbour of 0), `nibbles` of two
4-bit floats in a byte, and `plain` of integers and power-of-two scales. A step is taken modulo the number of values: every pair
of bit patterns, NaNs included, has one, and taking it backwards undoes it.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mxmoe.backends.host import delta as host
from mxmoe.checks import check_choice, check_tensor, dtype_name

ORDERS = ("sign_magnitude", "nibbles", "plain")
CHUNK = host.CHUNK
_FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SIGN_MAGNITUDE = (torch.float32, torch.bfloat16, torch.float16, *_FLOATS8)
_DTYPES = (*_SIGN_MAGNITUDE, torch.float8_e8m0fnu, torch.uint8, torch.int32)


@dataclass(frozen=True)
class Delta:
    """What `diff` found. Tensors on the CPU.

    changes, gap_bytes: (chunks,) int32, of each chunk: changed elements, bytes of `gaps`.
    gaps: (sum of gap_bytes,) uint8.  steps: (bytes of an element, sum of changes) uint8, the lowest byte first.
    """

    order: str
    changes: Tensor
    gap_bytes: Tensor
    gaps: Tensor
    steps: Tensor

    @property
    def num_changes(self) -> int:
        return self.steps.shape[1]


def order_of(dtype: torch.dtype) -> str:
    """The order of a dtype's values; bytes are taken for integers."""
    return "sign_magnitude" if dtype in _SIGN_MAGNITUDE else "plain"


def _check(name: str, t: Tensor, order: str):
    check_tensor(name, t, tuple(range(5)), _DTYPES)
    if t.device.type != "cpu" or not t.is_contiguous():
        raise ValueError(f"{name} must be contiguous on the CPU, got strides {tuple(t.stride())} on {t.device}")
    check_choice("order", order, ORDERS)
    if order == "nibbles" and t.element_size() != 1:
        raise ValueError(f"order 'nibbles' is of bytes that hold two values, got {name} of {dtype_name(t.dtype)}")


def _flat(t: Tensor) -> Tensor:
    return t.detach().reshape(-1).view({1: torch.uint8, 2: torch.bfloat16, 4: torch.int32}[t.element_size()])


def _starts(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int64), (1, 0))


def diff(before: Tensor, after: Tensor, order: str | None = None) -> Delta:
    """What leads from the bits of `before` to those of `after`.

    before, after: of one shape and dtype (FP32, BF16, FP16, FP8, E8M0, uint8 or int32), up to four dimensions, contiguous, on the
    CPU.
    order: one of ORDERS; None: by dtype.
    Raises TypeError or ValueError for anything else.
    """
    order = order_of(before.dtype) if order is None and isinstance(before, Tensor) else order
    _check("before", before, order)
    _check("after", after, order)
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        raise ValueError(
            f"after must be {dtype_name(before.dtype)} of shape {tuple(before.shape)} like before, "
            f"got {dtype_name(after.dtype)} of shape {tuple(after.shape)}"
        )
    a, b = _flat(before), _flat(after)
    changes, gap_bytes = host.count(a, b, order)
    first_change, first_gap = _starts(changes), _starts(gap_bytes)
    gaps = torch.empty(int(first_gap[-1]), dtype=torch.uint8)
    steps = torch.empty(before.element_size(), int(first_change[-1]), dtype=torch.uint8)
    if steps.numel():
        host.encode(a, b, order, first_change, first_gap, gaps, steps)
    return Delta(order, changes, gap_bytes, gaps, steps)


def check_delta(target: Tensor, delta: Delta):
    """Raises ValueError unless `delta` fits a tensor of this shape and dtype; after it, `apply` cannot fail half-way."""
    _check("target", target, delta.order)
    chunks = -(-target.numel() // CHUNK)
    of = f"for {dtype_name(target.dtype)} of shape {tuple(target.shape)}"
    for name, counts in (("changes", delta.changes), ("gap_bytes", delta.gap_bytes)):
        check_tensor(f"delta.{name}", counts, 1, (torch.int32,))
        if counts.shape[0] != chunks or (chunks and int(counts.min()) < 0):
            raise ValueError(f"delta.{name} must have {chunks} counts from 0 {of}, got {counts.shape[0]}")
    check_tensor("delta.gaps", delta.gaps, 1, (torch.uint8,))
    check_tensor("delta.steps", delta.steps, 2, (torch.uint8,))
    first_change, first_gap = _starts(delta.changes), _starts(delta.gap_bytes)
    expected = (int(first_gap[-1]),), (target.element_size(), int(first_change[-1]))
    got = tuple(delta.gaps.shape), tuple(delta.steps.shape)
    if expected != got or not (delta.gaps.is_contiguous() and delta.steps.is_contiguous()):
        raise ValueError(f"delta.gaps and delta.steps must be contiguous of shapes {expected[0]} and {expected[1]} {of}, got {got}")
    if chunks and not host.valid(_flat(target), first_change, first_gap, delta.gaps):
        raise ValueError(f"delta.gaps must lead to {delta.num_changes} elements {of}, got others")


def apply(target: Tensor, delta: Delta, backwards: bool = False) -> None:
    """Change `target` in place from the bits of `before` to those of `after`; `backwards`: the other way.

    The caller knows that target holds the version that the delta starts from; a delta of another shape or dtype is refused, with
    nothing changed.
    """
    check_delta(target, delta)
    if delta.num_changes:
        starts = _starts(delta.changes), _starts(delta.gap_bytes)
        host.apply(_flat(target), delta.order, *starts, delta.gaps, delta.steps, backwards)


def positions(delta: Delta) -> Tensor:
    """(changes,) int64: the flat indices of the changed elements, ascending."""
    found = []
    gaps = delta.gaps.to(torch.int64)
    for chunk, (start, end) in enumerate(pairwise(_starts(delta.gap_bytes).tolist())):
        own = gaps[start:end]
        ends = own < 255
        found.append((own + ends).cumsum(0)[ends] - 1 + chunk * CHUNK)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
