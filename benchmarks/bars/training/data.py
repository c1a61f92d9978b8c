"""Data: nothing is lost or read twice, however often a run is interrupted and by how many workers it is read."""

import json
import random
import warnings
from collections import Counter

import numpy as np

from benchmarks.bars.harness import Bar, Run
from tests.test_data import tokens_of
from training.data import Samples, Stream

INTERRUPTIONS = 100
SEQ_LEN = 16


def wrong_tokens(run: Run) -> float:
    """Tokens too many or too few, and samples out of order, over whole epochs that are interrupted at random; each time another
    number of workers (0-3), ranks (1-4) and rows a batch goes on. With and without weights of the sources."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
    rng, wrong = random.Random(0), 0
    for weights in (None, (0.3, 0.7)):
        lengths = np.random.default_rng(1).integers(2, 60, 200)
        tokens = tokens_of(lengths, sources=[i % 2 for i in range(200)])
        whole, state, read = Samples(tokens, "train", SEQ_LEN, 7, weights), None, []
        for _ in run.steps(range(run.count(INTERRUPTIONS // 2))):
            workers, world, size = rng.randrange(4), rng.choice((1, 2, 4)), rng.choice((1, 2, 5))
            samples = Samples(tokens, "train", SEQ_LEN, 7, weights)
            streams = [Stream(samples, rank=rank, world=world, workers=workers if rank == 0 else 0) for rank in range(world)]
            for stream in streams:
                if state:
                    stream.load_state_dict(state)
            for _ in range(rng.randrange(1, 12)):
                read += [
                    row for stream in streams for row in zip(*(part.tolist() for part in stream.next_batch(size)), strict=True)
                ]
            state = json.loads(json.dumps(streams[0].state_dict()))
        wrong += sum(tuple(whole[n].tolist()) != row for n, row in enumerate(read))
        if weights is None:
            wrong += miscounted(read[: len(read) // whole.num_rows[0] * whole.num_rows[0]], int(lengths.sum()), whole.num_rows[0])
        run.note(f"{len(read)} rows{' by weights' if weights else f', {len(read) / whole.num_rows[0]:.1f} epochs'}")
    return float(wrong)


def miscounted(rows: list, num_tokens: int, rows_of_epoch: int) -> int:
    """Targets of whole epochs that were read more or less often than once in each."""
    epochs = len(rows) // rows_of_epoch
    found: Counter = Counter()
    for ids, targets, _ in rows:
        found.update((i // 1000, t) if t == 0 else (t,) for i, t in zip(ids, targets, strict=True) if t >= 0)
    return (num_tokens - len(found) if epochs else 0) + sum(abs(count - epochs) for count in found.values())


BARS = [Bar("data: tokens lost or repeated, 100 interruptions, changing workers", "<=", 0, "tokens", wrong_tokens)]
