"""State tracking: a file, then many diffs; the model writes the file as it is after all of them.

The score is the mean distance in characters (Levenshtein) between what it writes and the true file, divided by the true one's
length. Writing the first file again is worth `copy`; a model that follows the diffs is below it. What the model thinks of the true
file, bits per byte given the transcript, tells small models apart that cannot write it.
"""

import difflib
import math
import random
import statistics
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from training.data.corpus import read_source
from training.evaluate.lm import LM, rolling_nll

LINES = (8, 16)  # of a file


@dataclass(frozen=True)
class Task:
    first: str
    diffs: tuple[str, ...]
    final: str

    @property
    def prompt(self) -> str:
        steps = "".join(f"\n# diff {i}\n{diff}" for i, diff in enumerate(self.diffs, 1))
        return f"# file\n{self.first}{steps}\n# the file after all diffs\n"


def distance(a: str, b: str) -> int:
    """Levenshtein: fewest characters inserted, removed or replaced that make b of a."""
    x, y = (np.frombuffer(text.encode("utf-32-le"), np.uint32) for text in (a, b))
    row = np.arange(len(y) + 1)
    steps = np.arange(len(y) + 1)
    for i, char in enumerate(x, 1):
        best = np.minimum(row[1:] + 1, row[:-1] + (y != char))
        row = np.minimum.accumulate(np.concatenate([[i], best]) - steps) + steps
    return int(row[-1])


def make_tasks(source: str, count: int, num_diffs: int, seed: int = 0) -> list[Task]:
    """From files of a source: pieces of a few lines, edited again and again with lines of other files. The same for the same
    arguments."""
    rng = random.Random(seed)
    documents = list(read_source(source))
    rng.shuffle(documents)
    pieces = []
    for document in documents:
        lines = [line for line in document.text.splitlines() if line.strip()]
        if len(lines) >= 4 * LINES[1]:
            at = rng.randrange(len(lines) - LINES[1])
            pieces.append([line[:80] for line in lines[at : at + rng.randint(*LINES)]])
        if len(pieces) == 2 * count:
            break
    if len(pieces) < 2:
        raise ValueError(f"{source} has too few files to edit, got {len(pieces)}")
    tasks = []
    for i in range(count):
        spare = [line for piece in pieces if piece is not pieces[i % len(pieces)] for line in piece]
        states = [list(pieces[i % len(pieces)])]
        while len(states) <= num_diffs:
            after = _edited(states[-1], spare, rng)
            if after != states[-1]:
                states.append(after)
        diffs = tuple(_diff(a, b) for a, b in pairwise(states))
        tasks.append(Task(_join(states[0]), diffs, _join(states[-1])))
    return tasks


def _edited(lines: list[str], spare: list[str], rng: random.Random) -> list[str]:
    at, new, lines = rng.randrange(len(lines)), rng.choice(spare), list(lines)
    kind = rng.choice(("replace", "insert", "remove") if len(lines) > 4 else ("replace", "insert"))
    if kind == "remove":
        del lines[at]
    else:
        lines[at : at + (kind == "replace")] = [new]
    return lines


def _join(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def _diff(a: list[str], b: list[str]) -> str:
    return "\n".join([line for line in difflib.unified_diff(a, b, lineterm="", n=1)][2:]) + "\n"


def state_tracking(lm: LM, source: str, count: int, num_diffs: int = 4) -> dict[str, float]:
    distances, copies, nll, size = [], [], 0.0, 0
    for task in make_tasks(source, count, num_diffs):
        prompt, final = lm.encode(task.prompt), lm.encode(task.final)
        prompt = prompt[-max(1, lm.window - len(final) - 1) :]
        nll += float(rolling_nll(lm, [*prompt, *final])[len(prompt) :].sum())
        size += len(task.final.encode())
        (answer,) = lm.sample([lm.bos, *prompt], 1, min(len(final) + 16, lm.window // 2), 0.0, 0)
        written = lm.decode(answer)[: 2 * len(task.final)]
        distances.append(distance(written, task.final) / len(task.final))
        copies.append(distance(task.first, task.final) / len(task.final))
    return {
        "state distance": statistics.fmean(distances), "state distance of a copy": statistics.fmean(copies),
        "state bits per byte": nll / math.log(2) / size,
    }  # fmt: skip
