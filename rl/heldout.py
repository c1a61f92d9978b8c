"""Evaluations on held-out tasks while a run goes on: the same workers, the weights that the samplers have."""

import json
import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl.evals.statistics import spread
from rl.rollout import Rollout
from rl.tasks.task import Task


@dataclass
class Evaluation:
    """Every task `samples` times. scores: by task and try, None until it is there; tells how an agent does beside a reward."""

    name: str
    version: int
    tasks: Sequence[Task]
    samples: int
    scores: list[list[float | None]] = field(default_factory=list)
    calls: int = 0
    invalid_calls: int = 0
    replies: int = 0
    tokens: int = 0

    def __post_init__(self):
        self.scores = self.scores or [[None] * self.samples for _ in self.tasks]
        self._left = deque((i, k) for k in range(self.samples) for i in range(len(self.tasks)) if self.scores[i][k] is None)

    def next(self) -> tuple[int, int] | None:
        """A try that nobody has begun: (task, number)."""
        return self._left.popleft() if self._left else None

    def again(self, task: int, number: int) -> None:
        """The machinery failed: it is to be begun once more."""
        self._left.append((task, number))

    def add(self, task: int, number: int, rollout: Rollout) -> None:
        self.scores[task][number] = rollout.solved
        kinds = rollout.calls
        self.calls += len(kinds)
        self.invalid_calls += sum(kind == "invalid" for kind in kinds)
        self.replies += sum(step["source"] == "agent" for step in rollout.trajectory["steps"])
        self.tokens += rollout.tokens

    @property
    def progress(self) -> str:
        done = sum(score is not None for row in self.scores for score in row)
        return f"{self.name}: {done} of {len(self.tasks) * self.samples} tries"

    @property
    def is_done(self) -> bool:
        return all(score is not None for row in self.scores for score in row)

    def report(self) -> dict[str, float]:
        """mean, best: of a task's samples; each with its standard error over tasks. parsed: share of calls that are valid."""
        means = [math.fsum(row) / len(row) for row in self.scores]
        best = [max(row) for row in self.scores]
        mean, mean_error = spread(means)
        top, top_error = spread(best)
        return {
            "version": self.version,
            "tasks": len(self.tasks),
            "samples": self.samples,
            "mean": mean,
            "mean_error": mean_error,
            "best": top,
            "best_error": top_error,
            "parsed": 1 - self.invalid_calls / max(self.calls, 1),
            "calls": self.calls / max(len(means) * self.samples, 1),
            "tokens": self.tokens / max(len(means) * self.samples, 1),
        }

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        content = self.report() | {"scores": dict(zip((task.name for task in self.tasks), self.scores, strict=True))}
        part = directory / f"{self.name}.part"
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, directory / f"{self.name}.json")


def gain(before: dict, after: dict) -> dict[str, tuple[float, float]]:
    """Of two saved evaluations of the same tasks: (difference, its standard error paired by task) of mean and best of a task.

    Raises ValueError where the tasks differ.
    """
    if before["scores"].keys() != after["scores"].keys():
        raise ValueError("before and after must be of the same tasks")
    out = {}
    for name, of in (("mean", lambda row: math.fsum(row) / len(row)), ("best", max)):
        out[name] = spread([of(after["scores"][task]) - of(row) for task, row in before["scores"].items()])
    return out
