"""Where bytes lie: padded groups and the blocked ("128x4") scale layout. Pure index arithmetic, each with its inverse.

docs/layouts.md draws them. Group offsets are int32 cumulative ends of length E, on the device of the data.
"""

import torch
from torch import Tensor

GROUP_ALIGNMENT = 128  # rows: each group's contraction length in a column copy, and its lines in a blocked scale matrix


def padded_rows(num_rows: int, num_groups: int) -> int:
    """Static bound of the padded rows of `num_rows` rows in `num_groups` groups: a multiple of 128, no host read needed."""
    return (num_rows + (GROUP_ALIGNMENT - 1) * num_groups) // GROUP_ALIGNMENT * GROUP_ALIGNMENT


def padded_starts(offs: Tensor) -> Tensor:
    """int32 (E,): first padded row of each group, 128 * sum of ceil(m_i / 128) over i < g."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    padded = (sizes + GROUP_ALIGNMENT - 1) // GROUP_ALIGNMENT * GROUP_ALIGNMENT
    return (padded.cumsum(0) - padded).to(torch.int32)


def offs_from_sizes(sizes: Tensor) -> Tensor:
    """Group sizes (E,) -> int32 cumulative end offsets (E,)."""
    return sizes.cumsum(0).to(torch.int32)


def offs_from_indptr(indptr: Tensor) -> Tensor:
    """indptr (E + 1,), starting at 0 -> int32 cumulative end offsets (E,)."""
    return indptr[1:].to(torch.int32)


def blocked_bytes(lines: int, blocks: int, num_groups: int | None = None) -> int:
    """Bytes of the blocked scale matrix of (lines, blocks) scales: lines padded to 128 (per group when grouped), blocks to 4."""
    padded_lines = -(-lines // 128) * 128 if num_groups is None else padded_rows(lines, num_groups)
    return padded_lines * (-(-blocks // 4) * 4)
