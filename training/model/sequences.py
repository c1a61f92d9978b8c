"""`Sequences`: which of a flat batch's tokens see which.

Tokens lie one after the other, sequence by sequence, whatever shape they came in: a row of a batch, a document packed with others
in one row, a prompt, the one new token of a sequence in the cache. A token sees those before it in its own sequence, the cached
ones included, and itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Sequences of a batch with equally many new tokens: their attention is computed together."""

    members: tuple[int, ...]  # places in the batch
    length: int  # new tokens of each
    past: tuple[int, ...]  # tokens before them
    slots: tuple[int, ...] | None  # of the cache

    @property
    def span(self) -> int:
        """Keys of the longest of them."""
        return max(self.past) + self.length

    def mask(self, keys: int, queries: range, device: torch.device) -> Tensor:
        """Which of the first `keys` keys the given ones of the new tokens see: bool (B or 1, queries, keys)."""
        return _mask(self.past[:1] if len(set(self.past)) == 1 else self.past, keys, queries, device)


@lru_cache(maxsize=16)  # every layer asks for the same ones
def _mask(past: tuple[int, ...], keys: int, queries: range, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        last = torch.tensor(past, device=device)[:, None] + torch.tensor(queries, device=device)
        return torch.arange(keys, device=device) <= last[..., None]


@dataclass(frozen=True)
class Sequences:
    """`lengths` new tokens of each sequence; `past` tokens of each in the cache, at `slots`; `positions` of the new ones, int64
    (T,) on the model's device: the distance from the sequence's first token, unless given otherwise."""

    lengths: tuple[int, ...]
    past: tuple[int, ...]
    slots: tuple[int, ...] | None
    positions: Tensor

    @staticmethod
    def of_rows(shape: torch.Size, positions: Tensor | None, device: torch.device) -> Sequences:
        """Without a cache: every row of `shape` (..., S) is a sequence; with positions of that shape also every run of them that
        counts up by one."""
        num_tokens, row = shape.numel(), shape[-1]
        if positions is None:
            lengths = (row,) * (num_tokens // max(row, 1))
            return Sequences(lengths, (0,) * len(lengths), None, torch.arange(row, device=device).repeat(len(lengths)))
        if positions.shape != shape:
            raise ValueError(f"positions must have the ids' shape {tuple(shape)}, got {tuple(positions.shape)}")
        flat = positions.flatten()
        starts = torch.ones(num_tokens, dtype=torch.bool, device=flat.device)
        starts[1:] = flat[1:] != flat[:-1] + 1
        starts[::row] = True
        ends = [*starts.nonzero().flatten().tolist(), num_tokens]
        lengths = tuple(b - a for a, b in pairwise(ends))
        return Sequences(lengths, (0,) * len(lengths), None, flat.to(device, torch.int64))

    @staticmethod
    def of_slots(lengths: Sequence[int], past: Sequence[int], slots: Sequence[int], device: torch.device) -> Sequences:
        """After `past` tokens in the slots of a cache."""
        positions = [torch.arange(p, p + n, device=device) for n, p in zip(lengths, past, strict=True)]
        return Sequences(tuple(lengths), tuple(past), tuple(slots), torch.cat(positions))

    @cached_property
    def slot_of_token(self) -> Tensor:
        """int64 (T,)"""
        lengths, slots = (torch.tensor(t, device=self.positions.device) for t in (self.lengths, self.slots))
        return slots.repeat_interleave(lengths)

    @cached_property
    def longest(self) -> int:
        """Positions up to the last token's."""
        return int(self.positions.max()) + 1 if len(self.positions) else 0

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        by_length: dict[int, list[int]] = {}
        for i, n in enumerate(self.lengths):
            by_length.setdefault(n, []).append(i)
        return tuple(
            Group(
                tuple(members), n, tuple(self.past[i] for i in members),
                None if self.slots is None else tuple(self.slots[i] for i in members),
            )
            for n, members in by_length.items()
        )  # fmt: skip

    def split(self, x: Tensor) -> list[Tensor]:
        """Tokens (T, ...) -> (B, n, ...) for each group."""
        if len(self.groups) == 1:
            return [x.unflatten(0, (len(self.lengths), self.groups[0].length))]
        pieces = x.split(self.lengths)
        return [torch.stack([pieces[i] for i in group.members]) for group in self.groups]

    def join(self, groups: Iterable[Tensor]) -> Tensor:
        """The inverse of `split`."""
        groups = list(groups)
        if len(groups) == 1:
            return groups[0].flatten(0, 1)
        pieces: list[Tensor | None] = [None] * len(self.lengths)
        for group, part in zip(self.groups, groups, strict=True):
            for i, piece in zip(group.members, part.unbind(), strict=True):
                pieces[i] = piece
        return torch.cat(pieces)
