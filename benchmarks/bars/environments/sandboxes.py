"""Bars of the `namespaces` backend: starts, bursts, many alive, commands, snapshots, leaks. Not measured where it does not run."""

import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from benchmarks.bars import suite
from benchmarks.bars.harness import Bar, NotMeasured, Run
from benchmarks.machine import ROOT
from rl.environments import open_backend
from rl.environments.images import BASIC, ImageStore, Recipe
from rl.environments.sandbox import Limits, SandboxError, SandboxSpec

LIMITS = Limits(memory_bytes=256 << 20, disk_bytes=64 << 20, inodes=20_000, pids=64)
FILES, BYTES = 2000, 20 << 20  # of the snapshot bars


@contextmanager
def opened(**options):
    """A backend and the specification of a small sandbox."""
    try:
        backend = open_backend("namespaces", **options)
    except SandboxError as error:
        raise NotMeasured(str(error)) from error
    with backend:
        yield backend, SandboxSpec(ImageStore(ROOT / "build" / "images").build(Recipe(programs=BASIC, python=True)), LIMITS)


def milliseconds(call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


@cache
def cold_starts(count: int) -> list[float]:
    """From nothing to the end of `sh -c true`, one after the other."""
    times = []
    with opened() as (backend, spec):
        for _ in range(count):
            start = time.perf_counter()
            sandbox = backend.create(spec)
            sandbox.exec("true")
            times.append((time.perf_counter() - start) * 1e3)
            sandbox.destroy()
    return sorted(times)


def percentile(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(share * len(times)))]


def cold_start(share: float):
    return lambda run: percentile(cold_starts(run.count(500, 10)), share)


def burst(run: Run) -> float:
    """Creates per second, each destroyed again, for five seconds."""
    end_after, threads = (0.2 if run.quick else 5.0), 4
    with opened() as (backend, spec):
        start = time.perf_counter()

        def make(_):
            made = 0
            while time.perf_counter() - start < end_after:
                backend.create(spec).destroy()
                made += 1
            return made

        with ThreadPoolExecutor(threads) as pool:
            made = sum(pool.map(make, range(threads)))
        return made / (time.perf_counter() - start)


def available() -> int:
    text = Path("/proc/meminfo").read_text()
    return int(re.search(r"MemAvailable:\s+(\d+)", text)[1]) << 10


@contextmanager
def many(count: int):
    with opened() as (backend, spec), ThreadPoolExecutor(4) as pool:
        before = available()
        sandboxes = list(pool.map(lambda _: backend.create(spec), range(count)))
        yield sandboxes, (before - available()) / count


def memory_each(run: Run) -> float:
    with many(run.count(500, 20)) as (sandboxes, each):
        assert all(sandbox.exec("true").ok for sandbox in sandboxes[:20])
        return each / 2**20


def alive(run: Run) -> float:
    """How many of 3,000 answer while all are alive."""
    with many(run.count(3000, 30)) as (sandboxes, _), ThreadPoolExecutor(8) as pool:
        return sum(pool.map(lambda sandbox: sandbox.exec("true").ok, sandboxes)) * (100 if run.quick else 1)


def exec_ms(run: Run) -> float:
    with opened() as (backend, spec), backend.create(spec) as sandbox:
        return statistics.median(milliseconds(lambda: sandbox.exec("true")) for _ in range(run.count(2000, 50)))


def commands_per_second(run: Run) -> float:
    """`echo; cat; ls` over 500 sandboxes from 16 threads."""
    with many(run.count(500, 20)) as (sandboxes, _), ThreadPoolExecutor(16) as pool:
        start = time.perf_counter()
        done = list(pool.map(lambda sandbox: sandbox.exec("echo a; cat /etc/passwd; ls /").ok, sandboxes * 4))
        assert all(done)
        return len(done) / (time.perf_counter() - start)


FILL = f"""
import os
for i in range({FILES}):
    os.makedirs(f'/tmp/d{{i % 50}}', exist_ok=True)
    open(f'/tmp/d{{i % 50}}/{{i}}', 'wb').write(os.urandom({BYTES // FILES}))
"""


@cache
def snapshots(count: int) -> dict[str, list[float]]:
    """Milliseconds of each verb on a sandbox with 2,000 files of 20 MB in its own layer, every time."""
    times = {"snapshot": [], "fork": [], "rollback": [], "manifest": []}
    with opened() as (backend, spec):
        for _ in range(count):
            with backend.create(spec) as sandbox:
                assert sandbox.exec(["python3", "-c", FILL]).ok
                start = time.perf_counter()
                snapshot = sandbox.snapshot()
                times["snapshot"].append((time.perf_counter() - start) * 1e3)
                snapshot.durable()
                times["manifest"].append((time.perf_counter() - start) * 1e3)
                times["rollback"].append(milliseconds(lambda: sandbox.rollback(snapshot)))  # noqa: B023
                assert sandbox.exec("ls /tmp/d*/* | wc -l").stdout == b"%d\n" % FILES
            with backend.create(spec) as sandbox:
                assert sandbox.exec(["python3", "-c", FILL]).ok
                start = time.perf_counter()
                with sandbox.fork() as fork:
                    times["fork"].append((time.perf_counter() - start) * 1e3)
                    assert fork.exec("ls /tmp/d*/* | wc -l").stdout == b"%d\n" % FILES
    return times


def escapes(run: Run) -> int:
    return suite.passing(("tests/test_sandbox_escape.py", "-k", "test_attempt"), run)


def left_of_a_thousand(run: Run) -> int:
    """250 sandboxes each under a killed client, daemon, half of the first processes, and both; the tests count what is left."""
    name = "test_nothing_is_left_whoever_is_killed" if run.quick else "test_nothing_is_left_of_a_thousand"
    return 4 - suite.passing(("tests/test_sandbox_leaks.py", "-k", name), run)


FAULTS = (
    "node_that_is_lost or first_process_killed or exhausted or create_that_fails or wall_clock or disk_bomb or store_without_room"
)


def faults(run: Run) -> int:
    files = [f"tests/test_sandbox{part}.py" for part in ("", "_leaks", "_escape", "_hostile")]
    return suite.passing((*files, "-k", f"({FAULTS}) and not subprocess and not hosted and not oci and not bubblewrap"), run)


def snapshot_ms(verb: str):
    return lambda run: statistics.median(snapshots(run.count(10, 2))[verb])


BARS = [
    Bar("cold start to the end of sh -c true, p50 of 500", "<=", 8, "ms", cold_start(0.5), "time"),
    Bar("cold start to the end of sh -c true, p99 of 500", "<=", 20, "ms", cold_start(0.99), "time"),
    Bar("creates sustained for 5 s", ">=", 150, "1/s", burst, "time"),
    Bar("memory of each of 500 alive", "<=", 1.5, "MiB", memory_each),
    Bar("alive and answering, of 3000", ">=", 3000, "sandboxes", alive),
    Bar("exec in a live sandbox, p50", "<=", 1.5, "ms", exec_ms, "time"),
    Bar("commands over 500 sandboxes", ">=", 400, "1/s", commands_per_second, "time"),
    Bar("snapshot of 2000 files, 20 MB", "<=", 10, "ms", snapshot_ms("snapshot"), "time"),
    Bar("fork of 2000 files, 20 MB", "<=", 10, "ms", snapshot_ms("fork"), "time"),
    Bar("rollback of 2000 files, 20 MB", "<=", 10, "ms", snapshot_ms("rollback"), "time"),
    Bar("manifest of 2000 files, 20 MB, from the call", "<=", 150, "ms", snapshot_ms("manifest"), "time"),
    Bar("escapes that work outside and are contained", ">=", 60, "attempts", escapes),
    Bar("kinds of things left of 1000 after kills and the reaper", "<=", 0, "kinds", left_of_a_thousand),
    Bar("faults that are told by type and spare the rest", ">=", 7, "faults", faults),
]
