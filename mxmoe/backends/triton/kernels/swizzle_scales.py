"""swizzle_scales: scales to the blocked layout and back. In rows padded per group a line's number is its blocked line, and a
group's blocks in a column copy lie together, so a tile needs its group's start alone."""

import triton
import triton.language as tl

from mxmoe import layout
from mxmoe.backends.triton.kernels.groups import ALIGN, group_at, rows_of_tile
from mxmoe.backends.triton.kernels.target import Target, group_slots

TILE = 128  # lines, or positions of the contraction, of a program


@triton.jit
def blocked_offset(line, block, num_blocks):
    """layout.blocked_offset: tiles of 128 lines x 4 blocks, 512 bytes each."""
    tile = line // 128 * ((num_blocks + 3) // 4) + block // 4
    r = line % 128
    return 512 * tile.to(tl.int64) + r % 32 * 16 + r // 32 * 4 + block % 4


@triton.jit
def swizzle_kernel(plain, blocked, offs, lines, blocks, blocked_bytes, num_groups, BLOCK: tl.constexpr, COLUMN: tl.constexpr,
                   INVERSE: tl.constexpr, EP: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    if COLUMN and EP:
        line = tl.program_id(0) * BR + tl.arange(0, BR)
        group, _, size, first = group_at(offs, num_groups, tl.program_id(1) * BK * BLOCK, EP, 128)
        lines_padded = ((lines + 127) // 128 * 128).to(tl.int64)
        inside = blocked_offset(line[:, None], k[None, :] - first // BLOCK, (size + 127) // 128 * (128 // BLOCK))
        at = lines_padded * (first // BLOCK) + inside
        grouped = tl.full((BK,), group, tl.int32) < num_groups
        mask = (line < lines)[:, None] & (grouped & (k < blocks))[None, :]
    else:
        p, line, live, _, _, _ = rows_of_tile(offs, num_groups, lines, tl.program_id(0), BR, EP)
        at = blocked_offset(p[:, None], k[None, :], blocks)
        mask = live[:, None] & (k < blocks)[None, :]
    from_plain = plain + (batch * lines + line)[:, None] * blocks + k[None, :]
    from_blocked = blocked + batch * blocked_bytes + at
    if INVERSE:
        tl.store(from_plain, tl.load(from_blocked, mask=mask), mask=mask)
    else:
        tl.store(from_blocked, tl.load(from_plain, mask=mask), mask=mask)


def swizzle_scales(on: Target, plain, blocked, offs_E, axis, block: int, inverse: bool):
    (plain if inverse else blocked).zero_()  # padding, and lines past the groups
    batches, lines, blocks = plain.shape
    num_groups, slots = group_slots(offs_E)
    column = axis == "column"
    padding = 0 if column else 127 * num_groups
    width = ALIGN // block  # blocks that surely lie in one group
    on.run(
        swizzle_kernel, (triton.cdiv(lines + padding, TILE), triton.cdiv(blocks, width), batches), plain=plain, blocked=blocked,
        offs=offs_E, lines=lines, blocks=blocks, blocked_bytes=blocked.shape[1], num_groups=num_groups, BLOCK=block, COLUMN=column,
        INVERSE=inverse, EP=slots, BR=TILE, BK=width, num_warps=4,
    )  # fmt: skip


assert layout.GROUP_ALIGNMENT == ALIGN
