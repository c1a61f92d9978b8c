"""Packing: documents of any length -> rows of seq_len tokens, every token in exactly one row.

A document longer than a row is cut into pieces; all but the last fill rows of their own. The rest are packed by best fit,
longest first (arXiv 2404.10830), so that no document is cut that need not be and hardly any space stays empty. Pieces in one row
do not see each other: positions restart at 0 with each, the end token of one does not predict the next, and empty space has no
loss.

    row     : | piece of A | all of B    | C     | - - |
    ids     :   a7 a8 a9     ^  b0 b1 b2   ^  c0   $ $      ^ begins, $ ends a document
    targets :   a8 a9 $      b0 b1 b2 $    c0 $    . .      . no loss
    position:   0  1  2      0  1  2  3    0  1    0 1
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Row r holds the pieces first[r] to first[r + 1]; piece p is `length[p]` tokens from `start[p]` on and begins its document
    where `is_head[p]`."""

    first: np.ndarray
    start: np.ndarray
    length: np.ndarray
    is_head: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1

    def pieces(self, row: int) -> list[tuple[int, int, bool]]:
        span = slice(self.first[row], self.first[row + 1])
        return list(zip(self.start[span].tolist(), self.length[span].tolist(), self.is_head[span].tolist(), strict=True))


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths add up to at most capacity, longest items first, each into the fullest bin it fits. Every
    length must be within 1 and capacity."""
    bins: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # free space -> bins that have it
    spaces = 0  # bit s: by_space[s] is not empty
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        if fits := spaces >> length:
            space = length + (fits & -fits).bit_length() - 1
            chosen = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        if left := space - length:
            by_space.setdefault(left, []).append(chosen)
            spaces |= 1 << left
    return bins


def pack(starts: np.ndarray, ends: np.ndarray, seq_len: int) -> Packing:
    """Packing of the documents [starts, ends) of a token file. Depends on these and seq_len alone."""
    lengths = ends - starts
    num_full, rest = lengths // seq_len, lengths % seq_len
    owner = np.repeat(np.arange(len(lengths)), num_full)
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(num_full) - num_full, num_full)
    tails = np.flatnonzero(rest)
    bins = best_fit(rest[tails], seq_len)
    order = tails[np.array([item for items in bins for item in items], dtype=np.int64)]
    sizes = np.concatenate([np.ones(len(owner), np.int64), np.array([len(items) for items in bins], np.int64)])
    return Packing(
        first=np.concatenate([[0], np.cumsum(sizes)]),
        start=np.concatenate([starts[owner] + rank * seq_len, (starts + num_full * seq_len)[order]]),
        length=np.concatenate([np.full(len(owner), seq_len), rest[order]]),
        is_head=np.concatenate([rank == 0, num_full[order] == 0]),
    )
