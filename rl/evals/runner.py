"""Runs a suite: every task several times, in parallel, resumable; what a number depends on is pinned beside it.

A run is a directory: run.json (the pins), results.jsonl (a line for each attempt), trajectories/ and patches/. An attempt that the
machinery broke (server gone, sandbox lost) has no score; it is tried again when the run is resumed, and counted in the report.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rl.environments.sandbox import Sandbox, SandboxError
from rl.evals.statistics import Scores
from rl.evals.suites import Entry, Judge, Outcome
from rl.harness.loop import SUMMARY, SYSTEM, LoopLimits, run
from rl.harness.model import Model
from rl.harness.patch import changed_lines, headers, same_name
from rl.harness.schema import ToolSet
from rl.harness.session import Session
from rl.harness.trajectory import Trajectory, dumped
from rl.tasks.task import TaskError
from rl.tasks.verification import Verdict, verify
from rl.tasks.workspace import Sandboxes, WorkLost, tree

RUN, RESULTS = "run.json", "results.jsonl"
MAX_TEXT = 1 << 20  # characters of a file that a rubric sees


@dataclass(frozen=True)
class Price:
    """Dollars for a million tokens."""

    prompt: float
    completion: float

    def of(self, trajectory: Trajectory) -> float:
        prompt = sum(reply.prompt_tokens for reply in trajectory.replies)
        return (prompt * self.prompt + trajectory.completion_tokens * self.completion) / 1e6


@dataclass(frozen=True)
class Result:
    """One attempt. `score` is None where the machinery failed: that is no zero."""

    task: str
    attempt: int
    score: float | None
    status: str
    reason: str = ""
    criteria: Mapping[str, bool] = field(default_factory=dict)
    end: str = ""
    seconds: float = 0.0  # from the request to the end of the work, without grading
    prompt_tokens: int = 0
    completion_tokens: int = 0
    replies: int = 0
    calls: int = 0
    invalid_calls: int = 0
    cost: float | None = None  # dollars
    changed_lines: int = 0


# Of a stored result's fields.
KINDS = {
    **dict.fromkeys(("task", "status", "reason", "end"), str),
    **dict.fromkeys(("attempt", "prompt_tokens", "completion_tokens", "replies", "calls", "invalid_calls", "changed_lines"), int),
    **{"score": int | float | None, "cost": int | float | None, "seconds": int | float, "criteria": Mapping},
}


def harness_digest(tools: ToolSet) -> str:
    """sha256 of what an agent is told and of the code that runs its tools."""
    content = hashlib.sha256(f"{tools.digest}\0{SYSTEM}\0{SUMMARY}".encode())
    for file in sorted(Path(__file__).parents[1].joinpath("harness").glob("*.py")):
        content.update(file.name.encode() + b"\0" + file.read_bytes())
    return content.hexdigest()


@dataclass(frozen=True)
class Settings:
    """What a run is of; all of it is pinned in run.json."""

    suite: str
    model: str
    version: str = ""  # of the model's weights
    passes: int = 1
    limits: LoopLimits = field(default_factory=LoopLimits)
    price: Price | None = None
    options: Mapping[str, float] = field(default_factory=dict)  # of sampling


class Evaluation:
    """A run of a suite in `directory`; one that is there already goes on, ValueError if it is of something else."""

    def __init__(self, directory: Path, settings: Settings, entries: Sequence[Entry], tools: ToolSet, judge: Judge | None = None):
        self.directory, self.settings, self.entries, self.tools, self.judge = Path(directory), settings, entries, tools, judge
        self._lock = threading.Lock()
        places = Counter(place_of(entry.task.name) for entry in entries)
        if twice := [entry.task.name for entry in entries if places[place_of(entry.task.name)] > 1]:
            raise ValueError(f"tasks: expected different names, got {', '.join(twice[:4])}")
        pins = json.loads(
            json.dumps(
                asdict(settings)
                | {
                    "harness": harness_digest(tools),
                    "tools": tools.digest,
                    "judged": judge is not None,
                    "tasks": {entry.task.name: entry.task.digest for entry in entries},
                }
            )
        )
        file = self.directory / RUN
        if file.exists():
            found = json.loads(file.read_text())
            found.pop("started", None)
            if odd := [key for key in {*found, *pins} if found.get(key) != pins.get(key)]:
                raise ValueError(f"{self.directory}: expected a run of the same {', '.join(sorted(odd))}; use another directory")
        else:
            self.directory.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(pins | {"started": time.strftime("%Y-%m-%d %H:%M:%S")}, indent=1) + "\n")

    def missing(self) -> list[tuple[Entry, int]]:
        """Attempts without a score: every task's first, then every task's second, ..."""
        done = {(result.task, result.attempt) for result in read_results(self.directory) if result.score is not None}
        every = ((entry, attempt) for attempt in range(self.settings.passes) for entry in self.entries)
        return [(entry, attempt) for entry, attempt in every if (entry.task.name, attempt) not in done]

    def run(
        self,
        model_of: Callable[[str, int], Model],
        sandboxes: Sandboxes,
        parallel: int = 1,
        on_result: Callable[[Result], None] = lambda result: None,
    ) -> list[Result]:
        """Makes the missing attempts. `model_of(task name, attempt)` gives the model of one attempt."""
        with ThreadPoolExecutor(parallel) as pool:
            futures = [pool.submit(self._attempt, entry, number, model_of, sandboxes) for entry, number in self.missing()]
            try:
                for future in as_completed(futures):
                    on_result(future.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return read_results(self.directory)

    def _attempt(self, entry: Entry, number: int, model_of: Callable[[str, int], Model], sandboxes: Sandboxes) -> Result:
        trajectory = Trajectory(self.settings.model, self.tools.schemas, self.tools.digest)
        patch = ""
        try:
            result, trajectory, patch = attempt(
                entry, number, model_of(entry.task.name, number), sandboxes, self.tools, self.settings, self.judge
            )
        except (SandboxError, TaskError) as error:
            result = Result(entry.task.name, number, None, "error", f"{type(error).__name__}: {error}")
        with self._lock:
            for kind, suffix in (("trajectories", "json"), ("patches", "diff")):
                place(self.directory, kind, result, suffix).parent.mkdir(parents=True, exist_ok=True)
            trajectory.save(place(self.directory, "trajectories", result, "json"))
            place(self.directory, "patches", result, "diff").write_bytes(patch.encode("utf-8", "surrogateescape"))
            with open(self.directory / RESULTS, "ab+") as file:  # last: a line means that all is there
                if file.tell():
                    file.seek(-1, 2)
                    if file.read(1) != b"\n":  # a crash cut the line before
                        file.write(b"\n")
                file.write((dumped(asdict(result)) + "\n").encode())
        return result


def place_of(task: str) -> str:
    """The directory's name of a task."""
    return task.replace("/", "--")


def place(directory: Path, kind: str, result: Result, suffix: str) -> Path:
    return Path(directory) / kind / place_of(result.task) / f"{result.attempt}.{suffix}"


def attempt(
    entry: Entry,
    number: int,
    model: Model,
    sandboxes: Sandboxes,
    tools: ToolSet,
    settings: Settings,
    judge: Judge | None,
    *,
    on_end: Callable[[], None] = lambda: None,
    verify: Callable[..., Verdict] = verify,
) -> tuple[Result, Trajectory, str]:
    """One attempt, graded. on_end: called when the work is over. verify: as rl.tasks.verification's. Raises SandboxError where the
    machinery failed."""
    task = entry.task
    limits = replace(settings.limits, seconds=min(settings.limits.seconds, task.agent_timeout_sec))
    turn = iter(range(1, limits.turns + 2))
    start = time.monotonic()
    with sandboxes.start(task, lease_s=limits.seconds + 600) as sandbox:
        session = Session(sandbox, task.environment.workdir)
        trajectory = run(
            model, session, tools, task.instruction, limits, inbox=lambda: [entry.said[n] for n in [next(turn)] if n in entry.said]
        )
        seconds = time.monotonic() - start
        on_end()
        answer = session.answer or (trajectory.replies[-1].text if trajectory.replies else "")
        try:
            patch, lost = sandboxes.changes(task, sandbox), ""
        except WorkLost as error:
            patch, lost = "", str(error)
        criteria = {}
        try:
            if entry.rubric and not lost:
                criteria = judged(entry, outcome_of(patch, sandbox, task, trajectory, answer), judge)
        except WorkLost as error:
            lost = str(error)
    result = Result(
        task.name,
        number,
        None,
        trajectory.end,
        trajectory.error,
        criteria,
        trajectory.end,
        seconds,
        sum(reply.prompt_tokens for reply in trajectory.replies),
        trajectory.completion_tokens,
        len(trajectory.replies),
        len(trajectory.calls),
        sum(found.kind == "invalid" for _, found in trajectory.calls),
        settings.price.of(trajectory) if settings.price else None,
        changed_lines(patch),
    )
    if trajectory.end in ("model_error", "sandbox_error"):
        return result, trajectory, patch
    if lost:
        return replace(result, score=0.0, status="lost", reason=lost), trajectory, patch
    if entry.rubric:
        missed = [name for name, fine in criteria.items() if not fine]
        score = 1 - len(missed) / len(criteria)
        return replace(result, score=score, status="failed" if missed else "resolved", reason=", ".join(missed)), trajectory, patch
    verdict = verify(task, patch, sandboxes, answer=answer)
    return replace(result, score=verdict.reward, status=verdict.status, reason=verdict.reason), trajectory, patch


def outcome_of(patch: str, sandbox: Sandbox, task, trajectory: Trajectory, answer: str) -> Outcome:
    workdir = task.environment.workdir
    files = {path: entry.data.decode("utf-8", "replace")[:MAX_TEXT] for path, entry in tree(sandbox, workdir).items()}
    names = frozenset(same_name(header) for header in headers(patch))

    def command(line: str):
        return sandbox.exec(line, cwd=workdir, timeout_s=30)

    return Outcome(patch, files, names, trajectory, answer, command)


def judged(entry: Entry, outcome: Outcome, judge: Judge | None) -> dict[str, bool]:
    criteria = {name: bool(criterion(outcome)) for name, criterion in entry.rubric.items()}
    return criteria | ({question: bool(judge(question, outcome)) for question in entry.questions} if judge else {})


def read_results(directory: str | Path) -> list[Result]:
    """The last result of every attempt, in the order of tasks and attempts; a line that was cut by a crash, or is no result, is
    left out."""
    file = Path(directory) / RESULTS
    found: dict[tuple[str, int], Result] = {}
    for line in file.read_bytes().split(b"\n") if file.exists() else ():
        try:
            result = Result(**json.loads(line))
            if odd := [name for name, kinds in KINDS.items() if not isinstance(getattr(result, name), kinds)]:
                raise TypeError(", ".join(odd))
            found[result.task, result.attempt] = result
        except (ValueError, TypeError, RecursionError):
            continue
    return [found[key] for key in sorted(found)]


def scores(results: Sequence[Result]) -> Scores:
    """Scores of each task's attempts that have one."""
    out: dict[str, list[float]] = {}
    for result in results:
        if result.score is not None:
            out.setdefault(result.task, []).append(result.score)
    return out
