"""Where bytes lie: padded groups and the blocked ("128x4") scale layout. Pure index arithmetic, each with its inverse.

docs/layouts.md draws them. Group offsets are int32 cumulative ends of length E, on the device of the data.
"""

import torch
from torch import Tensor

GROUP_ALIGNMENT = 128  # rows: each group's contraction length in a column copy, and its lines in a blocked scale matrix


def padded_rows(num_rows: int, num_groups: int) -> int:
    """Static bound of the padded rows of `num_rows` rows in `num_groups` groups: a multiple of 128, no host read needed."""
    return (num_rows + (GROUP_ALIGNMENT - 1) * num_groups) // GROUP_ALIGNMENT * GROUP_ALIGNMENT


def padded_sizes(offs: Tensor) -> Tensor:
    """int32 (E,): rows of each group, padded to a multiple of 128."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    return (sizes + GROUP_ALIGNMENT - 1) // GROUP_ALIGNMENT * GROUP_ALIGNMENT


def padded_starts(offs: Tensor) -> Tensor:
    """int32 (E,): first padded row of each group, 128 * sum of ceil(m_i / 128) over i < g."""
    padded = padded_sizes(offs)
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


def blocked_offset(line, block, num_blocks):
    """Byte of the scale (line, block) in the blocked matrix of `num_blocks` blocks per line. ints, or int tensors that broadcast.

    512-byte tiles of 128 lines x 4 blocks follow each other along the blocks, then along the lines; in a tile line r and block k
    lie at (r % 32) * 16 + (r // 32) * 4 + k.
    """
    tile = line // 128 * ((num_blocks + 3) // 4) + block // 4
    r = line % 128
    return 512 * tile + r % 32 * 16 + r // 32 * 4 + block % 4


def blocked_position(offset, num_blocks):
    """(line, block) of a byte of the blocked matrix, the inverse of `blocked_offset`; padding lies past the lines or blocks."""
    tiles_across = (num_blocks + 3) // 4
    tile, byte = offset // 512, offset % 512
    line = tile // tiles_across * 128 + byte % 16 // 4 * 32 + byte // 16
    return line, tile % tiles_across * 4 + byte % 4


def dense_strides(shape) -> tuple[int, ...]:
    """Of a contiguous tensor of that shape."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
