"""What is known of a run's files: read once each, the newest first, and again where they have changed.

Files of a run appear whole or not at all, so a file that cannot be read is damaged: it is named, and the rest is shown.
"""

import json
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from rl.objective import group_advantages
from rl.rewards import Reward

Stamp = tuple[int, int, int]
UNREADABLE = (
    *(safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError),
)
ROLLOUT = re.compile(r"rollouts/(\d+)/(\d+)\.safetensors")


@dataclass(frozen=True)
class Facts:
    """Of a rollout, for lists. tokens: the model's; oldest, newest: versions that chose them; reward: None: does not count."""

    prompt: str
    status: str
    solved: float | None
    reward: float | None
    error: str
    tokens: int
    segments: int
    oldest: int | None
    newest: int | None
    calls: int
    invalid: int
    seconds: float
    changed: int  # lines of the patch that add or remove


@dataclass(frozen=True)
class Damaged:
    """A file that cannot be read, and why."""

    file: str
    reason: str


def read_facts(path: Path) -> Facts:
    """Raises one of UNREADABLE. Only what is told of is read: neither log-probabilities nor experts."""
    with safetensors.safe_open(path, "np") as file:
        rest = json.loads(file.metadata()["rollout"])
        tensors = [(file.get_tensor(f"{i}.mask"), file.get_tensor(f"{i}.versions")) for i in range(rest["segments"])]
    chosen = [int(v) for mask, versions in tensors for v in versions[mask]]
    results = [r for step in rest["trajectory"].get("steps", ()) for r in (step.get("observation") or {}).get("results", ())]
    reward = Reward(**rest["reward"])
    return Facts(
        prompt=str(rest["prompt"]),
        status=str(rest["status"]),
        solved=None if rest["solved"] is None else float(rest["solved"]),
        reward=reward.total,
        error=str(reward.error),
        tokens=len(chosen),
        segments=len(tensors),
        oldest=min(chosen, default=None),
        newest=max(chosen, default=None),
        calls=len(results),
        invalid=sum(result["extra"]["kind"] == "invalid" for result in results),
        seconds=float(rest["seconds"]),
        changed=len(re.findall(r"^(?:\+(?!\+\+ )|-(?!-- ))", rest["patch"], re.M)),
    )


class Index:
    """Of the run in a directory. Any thread may ask; each asks for the files again. Raises FileNotFoundError for what is no run."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        if not any((run_dir / name).exists() for name in ("config.json", "state.json", "rollouts")):
            raise FileNotFoundError(f"{run_dir} is no run: it has neither config.json nor state.json nor rollouts")
        self._lock = threading.Lock()
        self._read: dict[str, tuple[Stamp, Any]] = {}  # by file: what was read of it, or Damaged

    def file(self, name: str, read: Callable[[Path], Any]) -> Any:
        """What `read` makes of a file of the run, Damaged where it cannot; None: it is not there."""
        try:
            stamp = stamp_of(os.stat(self.run_dir / name))
        except FileNotFoundError:
            return None
        known = self._read.get(name)
        if known is None or known[0] != stamp:
            known = stamp, attempted(read, self.run_dir / name, name)
            self._read[name] = known
        return known[1]

    def rollouts(self, group: int) -> dict[int, Facts | Damaged]:
        """Those of a group, by sample, read now where they are not known."""
        with self._lock:
            names = (f"rollouts/{group:06d}/{name}" for name in listed(self.run_dir / "rollouts" / f"{group:06d}"))
            found = {int(match[2]): self.file(match[0], read_facts) for name in names if (match := ROLLOUT.fullmatch(name))}
        return {sample: facts for sample, facts in sorted(found.items()) if facts is not None}

    def batches(self) -> tuple[dict[int, tuple[int, list[int]]], list[Damaged]]:
        """By group: the number of the step that trains it, and the samples that it takes; and what cannot be read."""
        found, damaged = {}, []
        for name in listed(self.run_dir / "batches"):
            if not (match := re.fullmatch(r"(\d+)\.json", name)):
                continue
            with self._lock:
                groups = self.file(f"batches/{name}", read_batch_names)
            if isinstance(groups, Damaged):
                damaged.append(groups)
            for group, samples in groups.items() if isinstance(groups, dict) else ():
                found[group] = int(match[1]), samples
        return found, damaged

    def groups(self, budget_s: float = 1.0) -> dict[str, Any]:
        """A row per group, and the damaged files. New files are read until `budget_s` is over; left: those to come."""
        trained, damaged = self.batches()
        end, left, rows = time.monotonic() + budget_s, 0, []
        numbers = sorted((int(name) for name in listed(self.run_dir / "rollouts") if name.isdigit()), reverse=True)
        for number in numbers:
            if time.monotonic() > end and (unknown := self._unknown(number)):
                left += unknown
                continue
            found = self.rollouts(number)
            damaged += [each for each in found.values() if isinstance(each, Damaged)]
            if found:
                rows.append(group_row(number, found, trained.get(number)))
        return {"rows": rows, "left": left, "damaged": [vars(each) for each in damaged]}

    def _unknown(self, group: int) -> int:
        names = (f"rollouts/{group:06d}/{name}" for name in listed(self.run_dir / "rollouts" / f"{group:06d}"))
        return sum(name not in self._read for name in names if ROLLOUT.fullmatch(name))

    def group(self, number: int, standardize: bool) -> dict[str, Any]:
        """A group's row and its rollouts, each with its advantage. Raises KeyError where there is none of it."""
        found = self.rollouts(number)
        if not found:
            raise KeyError(f"no rollout of group {number}")
        trained = self.batches()[0].get(number)
        advantages = advantages_of(found, trained, standardize)
        rows = [
            {"sample": sample} | vars(facts) | ({"advantage": advantages.get(sample)} if isinstance(facts, Facts) else {})
            for sample, facts in found.items()
        ]
        return group_row(number, found, trained) | {"rollouts": rows}


def group_row(number: int, found: dict[int, Facts | Damaged], trained: tuple[int, list[int]] | None) -> dict[str, Any]:
    """step: as metrics.jsonl counts, from 1; None: not trained yet. Means are over what has a value."""
    facts = [each for each in found.values() if isinstance(each, Facts)]
    solved = [each.solved for each in facts if each.solved is not None]
    rewards = [each.reward for each in facts if each.reward is not None]
    return {
        "group": number,
        "step": None if trained is None else trained[0] + 1,
        "prompt": facts[0].prompt if facts else "",
        "samples": len(found),
        "damaged": len(found) - len(facts),
        "reward": math.fsum(rewards) / len(rewards) if rewards else None,
        "solved": math.fsum(solved) / len(solved) if solved else None,
        "best": max(solved, default=None),
        "oldest": min((f.oldest for f in facts if f.oldest is not None), default=None),
        "newest": max((f.newest for f in facts if f.newest is not None), default=None),
        "statuses": dict(Counter(each.status for each in facts)),
        "tokens": sum(each.tokens for each in facts),
    }


def advantages_of(
    found: dict[int, Facts | Damaged], trained: tuple[int, list[int]] | None, standardize: bool
) -> dict[int, float | None]:
    """As the learner has them of the samples that the group's step takes; before it, of those that are there. A damaged file has
    no part in the baseline; None: of no part, or not to be had (a reward that is not finite)."""
    samples = [sample for sample in (found if trained is None else trained[1]) if isinstance(found.get(sample), Facts)]
    try:
        advantages, counts = group_advantages([found[sample].reward for sample in samples], standardize=standardize)
    except ValueError:
        return {}
    return {sample: a if c else None for sample, a, c in zip(samples, advantages.tolist(), counts.tolist(), strict=True)}


def stamp_of(stat: os.stat_result) -> Stamp:
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def attempted(read: Callable[[Path], Any], path: Path, name: str) -> Any:
    try:
        return read(path)
    except UNREADABLE as error:
        return Damaged(name, f"{type(error).__name__}: {error}"[:300])


def listed(directory: Path) -> list[str]:
    """Names in a directory, in order; none where it is not there."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_batch_names(path: Path) -> dict[int, list[int]]:
    """Samples by group. Raises ValueError for names that are no rollouts' files."""
    groups: dict[int, list[int]] = {}
    for name in (name for group in json.loads(path.read_text()) for name in group):
        if not (match := ROLLOUT.fullmatch(name)):
            raise ValueError(f"{name!r} is no rollout's file")
        groups.setdefault(int(match[1]), []).append(int(match[2]))
    return groups
