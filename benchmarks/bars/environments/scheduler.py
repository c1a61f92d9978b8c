"""Anyrun's scheduler: speed, memory and packing of 500,000 simulated environments, and a million random events."""

import json
import subprocess
import sys
from functools import cache

from benchmarks.bars.harness import Bar, Run
from benchmarks.machine import ROOT
from tests.anyrun_model import fuzz

ENVIRONMENTS, EVENTS = 500_000, 1_000_000


@cache
def simulated(environments: int) -> dict:
    """The numbers of one run, in a process of its own so that its memory is its own."""
    command = [sys.executable, "-m", "rl", "anyrun", "sim", "--environments", str(environments)]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def number(name: str):
    return lambda run: simulated(run.count(ENVIRONMENTS))[name]


def packing(run: Run) -> float:
    result = simulated(run.count(ENVIRONMENTS))
    return 100 * (max(result["packed"], result["packed_churned"]) - 1)


def violations(run: Run) -> float:
    """Events after which something was placed twice, a sum was wrong, or something was left over: raises at the first."""
    world = fuzz(run.count(EVENTS), seed=7, progress=run.steps)
    run.note(f"{world.count['Start']} placements, {sum(reason == 'node lost' for reason in world.ended.values())} lost with nodes")
    return 0.0


BARS = [
    Bar("scheduler: placements on one core", ">=", 2000, "1/s", number("placements_per_s"), kind="time"),
    Bar("scheduler: p99 of a placement", "<=", 50, "ms", number("p99_ms"), kind="time"),
    Bar("scheduler: memory of 500,000 environments", "<=", 4096, "MiB", number("memory_mib")),
    Bar("scheduler: nodes over the bound", "<=", 5, "%", packing),
    Bar("scheduler: placed twice or leaked in a million events", "<=", 0, "", violations),
]
