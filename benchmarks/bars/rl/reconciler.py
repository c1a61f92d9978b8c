"""The reconciler over simulated rollouts: its rate, its bound, and what it throws away."""

import random
import time
from collections import Counter
from functools import partial

from benchmarks.bars.harness import Bar, Run
from rl.reconciler import Reconciler
from tests.test_reconciler import simulate

ROLLOUTS, GROUP, PER_STEP, STALENESS = 10_000, 8, 5, 3


def simulated(what: str, run: Run) -> float:
    """Heavy-tailed durations, a tenth of the samplings failing, restarts, weights that arrive late."""
    reconciler = Reconciler(group_size=GROUP, groups_per_step=PER_STEP, max_staleness=STALENESS, attempts=100)
    steps = run.count(ROLLOUTS // (GROUP * PER_STEP), 5)
    trained, reconciler = simulate(reconciler, steps, random.Random(0), workers=96, sync=1.0, step_time=3.0, restarts=0.02)
    seen = Counter(group for batch in trained for group, _ in batch)
    ages = [age for batch in trained for _, age in batch]
    run.note(f"{len(seen) * GROUP} rollouts trained, mean age {sum(ages) / len(ages):.2f}")
    if what == "age":
        return max(ages)
    lost = set(range(reconciler._next_group)) - set(seen) - set(reconciler.groups)
    return len(lost) + sum(n - 1 for n in seen.values())


def transitions(run: Run) -> float:
    reconciler = Reconciler(group_size=GROUP, groups_per_step=16, max_staleness=4)
    seen = []
    reconciler.on_transition = lambda sample, old: seen.append(old)
    start = time.perf_counter()
    simulate(reconciler, run.count(200, 5), random.Random(2), workers=256, sync=0.1, step_time=0.1)
    return len(seen) / (time.perf_counter() - start)


BARS = [
    Bar("reconciler: transitions", ">=", 2000, "/s", transitions, kind="ratio"),
    Bar(f"reconciler: oldest version of {ROLLOUTS:,} simulated rollouts, bound {STALENESS}", "<=", STALENESS, "versions",
        partial(simulated, "age")),
    Bar(f"reconciler: of {ROLLOUTS:,} simulated rollouts, discarded or trained twice", "<=", 0, "groups",
        partial(simulated, "lost")),
]  # fmt: skip
