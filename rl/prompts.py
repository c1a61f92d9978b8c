"""Where prompts come from: the tiny family without end, or a directory of tasks; and the curriculum that chooses among them.

A prompt is a name, LEVEL:REST, from which its task can be made again. Each is given out once; a directory comes to its end.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rl.tasks.task import Task, TaskError, load


class Prompts(Protocol):
    """levels: how many difficulties there are, the easiest first."""

    levels: int

    def name(self, level: int, number: int) -> str | None:
        """The `number`-th prompt of a level; None: there are no more."""

    def task(self, name: str) -> Task:
        """Raises TaskError for a name that is none of its own."""


@dataclass
class Family:
    """Tasks made from a seed: instance(seed, level) -> Task. Seeds are `first` and up, so that no two uses share one."""

    instance: Callable[[int, int], Task]
    levels: int
    first: int = 0

    def name(self, level: int, number: int) -> str:
        return f"{level}:{self.first + number}"

    def task(self, name: str) -> Task:
        level, _, seed = name.partition(":")
        if not (level.isdecimal() and seed.isdecimal() and int(level) < self.levels):
            raise TaskError(f"prompt must be LEVEL:SEED, got {name!r}")
        return self.instance(int(seed), int(level))


class TaskDirectory:
    """A directory of task directories; levels by the difficulty (0 to 1) of their provenance, the middle one where it says none."""

    def __init__(self, directory: str | Path, levels: int = 4):
        self.directory, self.levels = Path(directory), levels
        self._names: list[list[str]] = [[] for _ in range(levels)]
        for file in sorted(self.directory.glob("*/task.toml")):
            difficulty = load(file.parent).provenance.difficulty
            level = min(int((0.5 if difficulty is None else difficulty) * levels), levels - 1)
            self._names[level].append(file.parent.name)
        if not any(self._names):
            raise TaskError(f"{self.directory}: expected task directories, found none")

    def name(self, level: int, number: int) -> str | None:
        return f"{level}:{self._names[level][number]}" if number < len(self._names[level]) else None

    def task(self, name: str) -> Task:
        directory = name.partition(":")[2]
        if not any(directory in names for names in self._names):
            raise TaskError(f"{self.directory}: no task {directory!r}")
        return load(self.directory / directory)


def level_of(name: str) -> int:
    """Of a prompt."""
    return int(name.partition(":")[0])


@dataclass
class Curriculum:
    """Draws levels in proportion to how much their groups teach: p (1 - p) of the mean reward's running mean, and a floor.

    Draws are keyed by seed and count: the same results give the same prompts. floor: the least weight of a level.
    """

    prompts: Prompts
    seed: int = 0
    memory: float = 0.9  # of the running mean, per group
    floor: float = 0.05
    solved: list[float] = field(default_factory=list)
    given: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.solved = self.solved or [0.5] * self.prompts.levels
        self.given = self.given or [0] * self.prompts.levels

    @property
    def weights(self) -> list[float]:
        return [max(p * (1 - p), self.floor) for p in self.solved]

    def next(self) -> str | None:
        """The next prompt; None: all have been given out."""
        open_levels = [level for level in range(self.prompts.levels) if self.prompts.name(level, self.given[level]) is not None]
        if not open_levels:
            return None
        draw = random.Random(f"{self.seed} {sum(self.given)}")
        level = draw.choices(open_levels, [self.weights[level] for level in open_levels])[0]
        name = self.prompts.name(level, self.given[level])
        self.given[level] += 1
        return name

    def learned(self, level: int, mean_solved: float) -> None:
        """A group of the level has been trained on."""
        self.solved[level] = self.memory * self.solved[level] + (1 - self.memory) * mean_solved

    def to_json(self) -> str:
        return json.dumps({"solved": self.solved, "given": self.given})

    def load_json(self, text: str) -> None:
        """Raises ValueError for the state of other prompts."""
        saved = json.loads(text)
        if len(saved["solved"]) != self.prompts.levels:
            raise ValueError(f"expected the state of {self.prompts.levels} levels, got {len(saved['solved'])}")
        self.solved, self.given = saved["solved"], saved["given"]
