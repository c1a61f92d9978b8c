"""swizzle_scales: the blocked ("128x4") scale layout and back, by the index arithmetic of mxmoe/layout.py."""

import torch
from torch import Tensor

from mxmoe import layout


def swizzle_scales(plain, blocked, offs_E, axis, block, inverse):
    _, num_lines, num_blocks = plain.shape
    line = torch.arange(num_lines, device=plain.device)[:, None]
    k = torch.arange(num_blocks, device=plain.device)[None, :]
    if offs_E is None:
        present, offset = torch.ones_like(line, dtype=torch.bool), layout.blocked_offset(line, k, num_blocks)
    elif axis == "row":
        present, offset = _row_groups(line, k, offs_E, num_blocks)
    else:
        present, offset = _column_groups(line, k, offs_E, num_lines, block)
    present = present.expand(num_lines, num_blocks)
    source, target = (blocked, plain) if inverse else (plain, blocked)
    source, target = source.view(torch.uint8), target.view(torch.uint8)
    target.zero_()
    if inverse:
        target[:, present] = source[:, offset[present]]
    else:
        target[:, offset[present]] = source[:, present]


def _row_groups(line: Tensor, k: Tensor, offs_E: Tensor, num_blocks: int):
    """One blocked matrix, in which group g's lines start at line padded_starts[g]."""
    group = torch.searchsorted(offs_E, line.int(), right=True)
    present = group < len(offs_E)
    group = group.clamp(max=len(offs_E) - 1)
    first = offs_E - offs_E.diff(prepend=offs_E.new_zeros(1))
    return present, layout.blocked_offset(line - first[group] + layout.padded_starts(offs_E)[group], k, num_blocks)


def _column_groups(line: Tensor, k: Tensor, offs_E: Tensor, num_lines: int, block: int):
    """A blocked matrix per group, of its own blocks, one after the other."""
    starts, sizes = layout.padded_starts(offs_E) // block, layout.padded_sizes(offs_E) // block
    group = torch.searchsorted(starts + sizes, k.int(), right=True)
    present = group < len(offs_E)
    group = group.clamp(max=len(offs_E) - 1)
    before = layout.blocked_bytes(num_lines, 4) // 4 * starts[group]
    return present, before + layout.blocked_offset(line, k - starts[group], sizes[group])
