"""Suites: lists of tasks, each graded by its hidden tests or, in the targeted suites, by a rubric.

bench       real tasks: the catalogue of rl.tasks, built from package releases
tiny        the tiny family's held-out split
intent, instructions, eager, quality, interruption      what hidden tests do not see (targeted.py)
a path      a directory of task directories
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl.environments.sandbox import ExecResult
from rl.harness.trajectory import Trajectory
from rl.tasks.pypi import Registry
from rl.tasks.release import build, catalogue
from rl.tasks.task import Task, TaskError, load, save
from rl.tasks.workspace import Sandboxes

TARGETED = ("intent", "instructions", "eager", "quality", "interruption")
TINY = 100  # instances


@dataclass(frozen=True)
class Outcome:
    """What a rubric judges: the end of one attempt."""

    patch: str
    files: Mapping[str, str]  # text of the work directory's files at the end
    changed: frozenset[str]  # paths that the patch touches
    trajectory: Trajectory
    answer: str  # the agent's last words
    run: Callable[[str], ExecResult]  # a command in the work directory as the agent left it


Criterion = Callable[[Outcome], bool]
Judge = Callable[[str, Outcome], bool]  # a question about an outcome: a model's or a person's yes or no


@dataclass(frozen=True)
class Entry:
    """A task of a suite. `rubric`: criteria by name, which then are the grade; `said`: what the user says before the n-th reply;
    `questions`: criteria that need a judge, left out where there is none."""

    task: Task
    rubric: Mapping[str, Criterion] = field(default_factory=dict)
    said: Mapping[int, str] = field(default_factory=dict)
    questions: tuple[str, ...] = ()


def suite(name: str, sandboxes: Sandboxes, directory: Path, limit: int | None = None) -> list[Entry]:
    """The suite called `name`, at most `limit` tasks of it.

    directory  where tasks are kept that take long to make
    Raises TaskError for an unknown suite and for tasks that cannot be made.
    """
    if name in TARGETED:
        from rl.evals import targeted

        return targeted.SUITES[name][:limit]
    if name == "tiny":
        from rl.tasks.tiny import instance

        return [Entry(instance(seed, "heldout")) for seed in range(TINY)][:limit]
    if name == "bench":
        return [Entry(bench_task(release, sandboxes, directory)) for release in catalogue()[:limit]]
    if Path(name).is_dir():
        places = sorted(file.parent for file in Path(name).glob("**/task.toml"))
        if places:
            return [Entry(load(place)) for place in places[:limit]]
    raise TaskError(f"--suite: expected bench, tiny, {', '.join(TARGETED)} or a directory of tasks, got {name!r}")


def bench_task(release, sandboxes: Sandboxes, directory: Path) -> Task:
    built = directory / "built" / release.name
    if not (built / "task.toml").exists():
        save(build(release, Registry(directory / "sdists"), sandboxes), built)
    return load(built)
