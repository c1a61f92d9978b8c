"""Where bytes lie: padded groups, the blocked ("128x4") scale layout, panels. Pure index arithmetic, each with its inverse.

docs/layouts.md draws them. Group offsets are int32 cumulative ends of length E, on the device of the data.
"""

import torch
from torch import Tensor

PANEL_LINES, PANEL_BLOCK = 64, 32  # lines of a panel; elements of its lines that lie together
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


def in_panels(values: Tensor, bits: int) -> Tensor:
    """uint8 (E, R, bytes of L elements) -> a view in the order of (E, R / 64, L / 32, bytes of 64 x 32 elements)."""
    experts, panels = values.shape[0], values.shape[1] // PANEL_LINES
    if bits == 4:  # words of 8 elements: line, block, word -> block, word, line
        return values.view(torch.int32).view(experts, panels, PANEL_LINES, -1, 4).permute(0, 1, 3, 4, 2)
    pairs = values.view(torch.int16).view(experts, panels, PANEL_LINES // 4, 4, -1, 8, 2)
    return pairs.permute(0, 1, 4, 5, 2, 6, 3)  # four, line, block, word, pair -> block, word, four, pair, line


def in_lines(panels: Tensor, bits: int) -> Tensor:
    """uint8 (E, R / 64, L / 32, bytes of 64 x 32 elements) -> a view in the order of (E, R, bytes of L elements)."""
    if bits == 4:
        return panels.view(torch.int32).unflatten(3, (4, PANEL_LINES)).permute(0, 1, 4, 2, 3)
    pairs = panels.view(torch.int16).unflatten(3, (8, PANEL_LINES // 4, 2, 4))
    return pairs.permute(0, 1, 4, 6, 2, 3, 5)


def dense_strides(shape) -> tuple[int, ...]:
    """Of a contiguous tensor of that shape."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
