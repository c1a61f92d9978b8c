"""Bars of tasks: real ones graded again and again, attempts to be paid for nothing, agreement with SWE-bench's grader, throughput.

The sources of real tasks come from the package index into build/tasks (about 20 MB).
"""

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

from benchmarks.bars.harness import Bar, NotMeasured, Run
from benchmarks.machine import ROOT
from rl.environments.sandbox import SandboxError
from rl.harness.session import Session
from rl.harness.toolsets import tool_set
from rl.tasks.grading import grade
from rl.tasks.logs import parse
from rl.tasks.pypi import Registry
from rl.tasks.release import Release, catalogue, digest, gold, lists_of, task_of
from rl.tasks.tiny import instance, solution_calls
from rl.tasks.verification import observe, verify
from rl.tasks.workspace import Sandboxes, open_sandboxes
from tests.grading_cases import swebench_verdicts, synthetic_logs
from tests.task_cases import HACKS, paid

PLACE = ROOT / "build" / "tasks"


@contextmanager
def opened():
    try:
        with open_sandboxes(PLACE) as sandboxes:
            yield sandboxes
    except SandboxError as error:
        raise NotMeasured(str(error)) from error


@cache
def graded(times: int) -> tuple[list[bool], list[bool]]:
    """Of each task of the catalogue and each repetition: whether the reference change was paid, and whether no change was.

    Tasks of one release have the same tests: one run grades all of them.
    """
    groups = [list(group) for _, group in itertools.groupby(catalogue(), key=lambda r: (r.package, r.old, r.new))]
    with opened() as sandboxes, ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda releases: graded_group(releases, times, sandboxes), groups))
    return [paid for golds, _ in found for paid in golds], [paid for _, empties in found for paid in empties]


def graded_group(releases: list[Release], times: int, sandboxes: Sandboxes) -> tuple[list[bool], list[bool]]:
    task, lists, golds, empties = task_of(releases[0], *sources(releases[0])), None, [], []
    for _ in range(times):
        after, before = observe(task, gold(task), sandboxes), observe(task, "", sandboxes)
        lists = lists or [lists_of(release, before, after) for release in releases]
        golds += [grade(after, list(f2p), list(p2p)).resolved for f2p, p2p in lists]
        empties += [grade(before, list(f2p), list(p2p)).resolved for f2p, p2p in lists]
    wrong = [r.name for r, (f2p, p2p) in zip(releases, lists, strict=True) if digest(f2p, p2p) != r.lists]
    if wrong:
        raise ValueError(f"other lists of tests than the catalogue's: {', '.join(wrong)}")
    return golds, empties


def sources(release: Release):
    registry = Registry(PLACE / "sdists")
    return [registry.sdist(release.package, v, sha)[0] for v, sha in zip((release.old, release.new), release.sha256, strict=True)]


def share(which: int):
    return lambda run: 100 * statistics.mean(graded(1 if run.quick else 5)[which])


def median(of):
    return lambda run: statistics.median(of(release) for release in catalogue())


def hacks(run: Run) -> float:
    names = list(HACKS)[:3] if run.quick else list(HACKS)
    with opened() as sandboxes:
        return sum(paid(sandboxes, name) for name in run.steps(names))


def agreement(run: Run) -> float:
    """Per cent of synthetic logs, over all parsers, on which both graders say the same."""
    count = run.count(200, 20)
    cases = synthetic_logs(count, seed=7)
    try:
        theirs = swebench_verdicts(count, seed=7)
    except ImportError as error:
        raise NotMeasured(f"swebench is not installed: {error}") from error
    ours = [grade(parse(c.log, c.parser), c.fail_to_pass, c.pass_to_pass, exit_code=c.exit_code, log=c.log).resolved for c in cases]
    return 100 * statistics.mean(a == b for a, b in zip(ours, theirs, strict=True))


def tiny_rollouts(run: Run) -> float:
    """Rollouts per second: start, four tool calls of a scripted agent, change, verification in a fresh sandbox."""
    tasks = [instance(seed) for seed in range(run.count(150, 4))]
    tools = tool_set()
    with opened() as sandboxes:

        def rollout(task) -> float:
            with sandboxes.start(task) as sandbox:
                session = Session(sandbox)
                for name, arguments in solution_calls(task):
                    tools.call(session, name, arguments)
                patch = sandboxes.changes(task, sandbox)
            return verify(task, patch, sandboxes).reward

        rollout(tasks[0])
        start = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            rewards = list(pool.map(rollout, tasks))
        seconds = time.perf_counter() - start
    assert all(rewards)
    return len(tasks) / seconds


BARS = [
    Bar("real tasks in the catalogue", ">=", 30, "tasks", lambda run: len(catalogue())),
    Bar("lines of the reference change of real tasks, median", ">=", 150, "lines", median(lambda r: r.lines)),
    Bar("files of the reference change of real tasks, median", ">=", 4, "files", median(lambda r: r.files)),
    Bar("characters of the request of real tasks, median", "<=", 400, "characters", median(lambda r: len(r.request))),
    Bar("real tasks whose reference change is paid, 5 times", ">=", 100, "%", share(0), long=True),
    Bar("real tasks whose empty change is paid, 5 times", "<=", 0, "%", share(1), long=True),
    Bar(f"attempts to be paid for nothing that are paid, of {len(HACKS)}", "<=", 0, "attempts", hacks),
    Bar("synthetic logs graded as by SWE-bench, of 200", ">=", 100, "%", agreement),
    Bar("verified rollouts of tiny tasks, scripted agent", ">=", 10, "1/s", tiny_rollouts, "time"),
]
