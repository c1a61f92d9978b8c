"""Samples in one global order, and batches of them.

Sample n of a run is a function of the seed and n alone: which source it comes from, which row of that source. Ranks and worker
processes only decide who looks it up, so the position of a run is one number, the same however many there are of either.

Without weights all rows are one pool, shuffled anew each epoch. With weights every block of 1000 samples holds each source in
its share, in random order; each source is shuffled and repeated for itself.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from training.data.cache import Tokens
from training.data.packing import pack

IGNORE = -100  # target of a position without loss
BLOCK = 1000  # samples in which sources have exactly their shares


class Batch(NamedTuple):
    """int64 (B, S) each. A position of 0 begins a document, which sees nothing before it."""

    ids: Tensor
    targets: Tensor
    positions: Tensor


def quotas(weights: tuple[float, ...]) -> np.ndarray:
    """How many of BLOCK samples come from each source: largest remainders, at least one."""
    exact = np.array(weights) * BLOCK
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    for idx in np.argsort(counts - exact, kind="stable")[: max(0, BLOCK - counts.sum())]:
        counts[idx] += 1
    while counts.sum() > BLOCK:  # sources with less than a thousandth took more than their share
        counts[np.argmax(counts - exact)] -= 1
    return counts


class Samples(Dataset):
    """Row `samples[n]` of the endless global order; `row(pool, idx)` is one row by place. ValueError where a source does not
    even fill half a row."""

    def __init__(self, tokens: Tokens, split: str, seq_len: int, seed: int = 0, weights: tuple[float, ...] | None = None):
        self.tokens, self.split, self.seq_len, self.seed = tokens, split, seq_len, seed
        ends, source = tokens.ends[split], tokens.source[split]
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        pools = [np.ones(len(ends), bool)] if weights is None else [source == idx for idx in range(len(weights))]
        for idx, pool in enumerate(pools):
            num_tokens = int((ends - starts)[pool].sum())
            if 2 * num_tokens < seq_len:
                place = f"source {idx} of the {split} split"
                raise ValueError(f"a row of {seq_len} must not be more than half empty, got {num_tokens} tokens in {place}")
        self.pools = [pack(starts[pool], ends[pool], seq_len) for pool in pools]
        self.quotas = quotas(weights or (1.0,))
        self._order = lru_cache(2 * len(self.pools))(self._shuffled)
        self._block = lru_cache(2)(self._mixed)

    def __getstate__(self) -> dict:  # worker processes make their own caches
        return {name: value for name, value in vars(self).items() if name not in ("_order", "_block")}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._order = lru_cache(2 * len(self.pools))(self._shuffled)
        self._block = lru_cache(2)(self._mixed)

    @property
    def num_rows(self) -> list[int]:
        return [len(pool) for pool in self.pools]

    def _shuffled(self, pool: int, epoch: int) -> np.ndarray:
        """Of a pool's rows in an epoch."""
        return np.random.default_rng([self.seed, epoch, pool]).permutation(len(self.pools[pool]))

    def _mixed(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Of a block's samples: their pools, and how many of the same pool come before in the block."""
        pools = np.random.default_rng([self.seed, block, BLOCK]).permutation(np.repeat(np.arange(len(self.pools)), self.quotas))
        order = np.argsort(pools, kind="stable")
        ranks = np.empty(BLOCK, np.int64)
        ranks[order] = np.arange(BLOCK) - np.repeat(np.cumsum(self.quotas) - self.quotas, self.quotas)
        return pools, ranks

    def locate(self, n: int) -> tuple[int, int]:
        """(pool, row) of sample n."""
        if len(self.pools) == 1:
            pool, count = 0, n
        else:
            pools, ranks = self._block(n // BLOCK)
            pool = int(pools[n % BLOCK])
            count = n // BLOCK * int(self.quotas[pool]) + int(ranks[n % BLOCK])
        epoch, place = divmod(count, len(self.pools[pool]))
        return pool, int(self._order(pool, epoch)[place])

    def row(self, pool: int, idx: int) -> np.ndarray:
        """ids, targets and positions, int64 (3, S)."""
        tokens, learned = self.tokens.ids[self.split], self.tokens.learned[self.split]
        out = np.empty((3, self.seq_len), np.int64)
        at = 0
        for start, length, is_head in self.pools[pool].pieces(idx):
            ids, targets, positions = out[:, at : at + length]
            targets[:] = tokens[start : start + length]
            ids[1:] = targets[:-1]
            ids[0] = self.tokens.bos if is_head else tokens[start - 1]
            positions[:] = np.arange(length)
            if learned is not None:
                targets[learned[start : start + length] == 0] = IGNORE
            at += length
        out[0, at:], out[1, at:], out[2, at:] = self.tokens.eos, IGNORE, np.arange(self.seq_len - at)
        return out

    def __getitem__(self, n: int) -> Tensor:
        return torch.from_numpy(self.row(*self.locate(n)))

    def spread(self, count: int) -> list[Tensor]:
        """At most `count` rows, evenly spaced over the data, always the same ones; for a split without weights."""
        rows = np.linspace(0, len(self.pools[0]) - 1, min(count, len(self.pools[0]))).round().astype(int)
        return [torch.from_numpy(self.row(0, int(row))) for row in rows]


def batch(rows: list[Tensor]) -> Batch:
    """Rows (3, S) -> ids, targets and positions (B, S)."""
    return Batch(*(column.contiguous() for column in torch.stack(rows).unbind(1)))


class Stream:
    """Batches of one rank in the global order: of every world * size samples, rank r takes the r-th `size`.

    workers: processes that read ahead. What they have read and the run has not taken is read again after a restart: the state is
    the number of samples taken.
    """

    def __init__(self, samples: Samples, *, rank: int = 0, world: int = 1, workers: int = 0):
        self.samples, self.rank, self.world, self.workers = samples, rank, world, workers
        self.position = 0
        self._ahead: tuple[int, Iterator[Batch]] | None = None  # batch size it was started with

    def next_batch(self, size: int) -> Batch:
        if self.workers and (self._ahead is None or self._ahead[0] != size):
            loader = DataLoader(
                self.samples, batch_sampler=_Indices(self, size), collate_fn=batch, num_workers=self.workers, prefetch_factor=4
            )
            self._ahead = size, iter(loader)
        if self.workers:
            result = next(self._ahead[1])
        else:
            first = self.position + self.rank * size
            result = batch([self.samples[n] for n in range(first, first + size)])
        self.position += size * self.world
        return result

    def state_dict(self) -> dict:
        return {"position": self.position, "seed": self.samples.seed, "num_rows": self.samples.num_rows}

    def load_state_dict(self, state: dict) -> None:
        """ValueError where the state belongs to other data or another seed."""
        own = self.state_dict()
        for name in ("seed", "num_rows"):
            if state[name] != own[name]:
                raise ValueError(f"data position was saved with {name} {state[name]}, got {own[name]}")
        self.position, self._ahead = state["position"], None


class _Indices:
    """Indices of the batches from the stream's position on."""

    def __init__(self, stream: Stream, size: int):
        self.first, self.stride, self.size = stream.position + stream.rank * size, stream.world * size, size

    def __iter__(self) -> Iterator[range]:
        first = self.first
        while True:
            yield range(first, first + self.size)
            first += self.stride
