"""The kernels behind mxmoe/delta.py: counted, encoded, checked and applied, chunk by chunk on every thread."""

import torch

from mxmoe.backends.host.extension import _C, execution

CHUNK = _C.DELTA_CHUNK  # elements coded on their own


def count(before, after, order):
    changes, gap_bytes = torch.zeros(2, -(-before.numel() // CHUNK), dtype=torch.int32).unbind()
    _C.delta_count(before, after, order, changes, gap_bytes, *execution())
    return changes, gap_bytes


def encode(before, after, order, first_change, first_gap, gaps, steps):
    _C.delta_encode(before, after, order, first_change, first_gap, gaps, steps, *execution())


def valid(target, first_change, first_gap, gaps):
    return _C.delta_valid(target, first_change, first_gap, gaps, *execution())


def apply(target, order, first_change, first_gap, gaps, steps, backwards):
    _C.delta_apply(target, order, first_change, first_gap, gaps, steps, backwards, *execution())
