"""Where a tile of rows lies among the groups, found on the device from the groups' ends.

Tiles are taken from rows padded per group to a multiple of ALIGN, so that each lies in one group. Rows past the last group form one
more group, number `num_groups`, without live rows.
"""

import triton
import triton.language as tl

ALIGN = 128  # layout.GROUP_ALIGNMENT


@triton.jit
def group_at(offs, num_groups, position, EP: tl.constexpr, ALIGNED: tl.constexpr):
    """(group, its first row, its number of rows, its first padded row) of a padded row; EP: num_groups or more, a power of two."""
    e = tl.arange(0, EP)
    known = e < num_groups
    ends = tl.load(offs + e, mask=known, other=0)
    starts = tl.load(offs + e - 1, mask=known & (e > 0), other=0)
    sizes = ends - starts
    padded = (sizes + (ALIGNED - 1)) // ALIGNED * ALIGNED
    before = known & (tl.cumsum(padded, 0) <= position)
    group = tl.sum(before.to(tl.int32), 0)
    first = tl.sum(tl.where(before, sizes, 0), 0)
    size = tl.sum(tl.where(e == group, sizes, 0), 0)
    return group, first, size, tl.sum(tl.where(before, padded, 0), 0)


@triton.jit
def padded_total(offs, num_groups, EP: tl.constexpr, ALIGNED: tl.constexpr):
    """(padded rows of all groups, end of the last one)."""
    e = tl.arange(0, EP)
    ends = tl.load(offs + e, mask=e < num_groups, other=0)
    sizes = ends - tl.load(offs + e - 1, mask=(e < num_groups) & (e > 0), other=0)
    return tl.sum((sizes + (ALIGNED - 1)) // ALIGNED * ALIGNED, 0), tl.max(ends, 0)


@triton.jit
def rows_of_tile(offs, num_groups, num_rows, tile, BR: tl.constexpr, EP: tl.constexpr):
    """Of a tile of BR rows: (padded rows p, rows, whether a row is live, whether it is to be written, group, first padded row of
    the group). EP 0: no groups, every row is its own padded row."""
    p = tile * BR + tl.arange(0, BR)
    if EP == 0:
        return p, p, p < num_rows, p < num_rows, 0, 0
    else:
        group, first, size, padded_first = group_at(offs, num_groups, tile * BR, EP, 128)
        inside = p - padded_first
        rows = first + inside
        live = inside < size
        past = (tl.full((BR,), group, tl.int32) == num_groups) & (rows < num_rows)
        return p, rows, live, live | past, group, padded_first
