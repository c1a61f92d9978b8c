"""Random ways to compute the logits of the same documents, for the deterministic mode: alone, packed, prefilled, decoded."""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from training.model import KVCache, Model

LENGTHS = (1, 2, 17, 64, 129, 300)  # below, at and past the sizes that the attention works in


def documents(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    return [torch.randint(vocab_size, (n,), generator=g) for n in lengths]


@torch.no_grad()
def alone(model: Model, docs: list[Tensor]) -> list[Tensor]:
    """Logits (n, V) of each document by itself."""
    return [model(doc.unsqueeze(0))[0][0] for doc in docs]


@torch.no_grad()
def packed(model: Model, docs: list[Tensor], rng: Random) -> list[Tensor]:
    """In rows of one length, several documents to a row, the rest of a row filled with another."""
    order = rng.sample(range(len(docs)), len(docs))
    width = max(len(doc) for doc in docs) + rng.randrange(100)
    rows: list[list[int]] = [[]]
    for i in order:
        if sum(len(docs[j]) for j in rows[-1]) + len(docs[i]) > width:
            rows.append([])
        rows[-1].append(i)
    ids, positions = [], []
    for row in rows:
        rest = width - sum(len(docs[i]) for i in row)
        parts = [docs[i] for i in row] + [torch.randint(model.config.vocab_size, (rest,))]
        ids.append(torch.cat(parts))
        positions.append(torch.cat([torch.arange(len(part)) for part in parts]))
    logits = model(torch.stack(ids), torch.stack(positions))[0]
    found: dict[int, Tensor] = {}
    for row, values in zip(rows, logits, strict=True):
        for i, part in zip(row, values.split([len(docs[i]) for i in row] + [width - sum(len(docs[i]) for i in row)]), strict=False):
            found[i] = part
    return [found[i] for i in range(len(docs))]


@dataclass
class Progress:
    """A document on its way through the cache."""

    slot: int
    done: int
    logits: list[Tensor]


@torch.no_grad()
def cached(model: Model, docs: list[Tensor], rng: Random) -> list[Tensor]:
    """Through the cache: in each step some of the documents go on by one token or by several, so that a batch mixes prompts and
    decoding; now and then a document goes on from a copy of its prefix, or some of its tokens are taken back and computed again."""
    cache = KVCache(model.config, len(docs) + 1, max(len(doc) for doc in docs) + rng.randrange(50))
    progress = [Progress(cache.allocate(), 0, []) for _ in docs]
    longest = rng.choice((1, 4, 40, 400))
    while todo := [i for i, doc in enumerate(docs) if progress[i].done < len(doc)]:
        batch = rng.sample(todo, rng.randint(1, len(todo)))
        lengths = [min(len(docs[i]) - progress[i].done, rng.choice((1, rng.randint(1, longest), longest))) for i in batch]
        ids = torch.cat([docs[i][progress[i].done : progress[i].done + n] for i, n in zip(batch, lengths, strict=True)])
        logits = model(ids, cache=cache, slots=[progress[i].slot for i in batch], lengths=lengths)[0]
        for i, n, values in zip(batch, lengths, logits.split(lengths), strict=True):
            progress[i].logits.append(values)
            progress[i].done += n
        _disturb(cache, progress[rng.choice(batch)], rng)
    return [torch.cat(p.logits) for p in progress]


def _disturb(cache: KVCache, p: Progress, rng: Random):
    if rng.random() < 0.1:
        copy = cache.allocate(like=p.slot)
        cache.free(p.slot)
        p.slot = copy
    elif rng.random() < 0.1 and len(p.logits) > 1:
        last = p.logits.pop()
        p.done -= len(last)
        cache.truncate(p.slot, p.done)


def differing_bytes(model: Model, docs: list[Tensor], expected: list[Tensor], seed: int) -> int:
    """Of all logits, computed in a way that the seed chooses, on one thread or two."""
    rng, threads = Random(seed), torch.get_num_threads()
    torch.set_num_threads(rng.choice((1, 2)))
    try:
        way = (packed, cached)[seed % 2]
        got = way(model, docs, rng)
    finally:
        torch.set_num_threads(threads)
    pairs = zip(got, expected, strict=True)
    return sum(int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()) for a, b in pairs)
