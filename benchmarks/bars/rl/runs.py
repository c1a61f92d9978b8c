"""The demo and the ablations, as `make rl-ablations` recorded them: whole runs are too long to be made for a bar."""

import json
import math
from functools import partial
from itertools import pairwise

from benchmarks import rl_runs
from benchmarks.bars.harness import Bar, NotMeasured, Run

SEEDS = 3


def results(name: str) -> list[dict]:
    """Records of the runs called `name`; NotMeasured where there are not three, or one does not say what it is of."""
    if not rl_runs.RESULTS.exists():
        raise NotMeasured(f"{rl_runs.COMMAND} was not run")
    found = json.loads(rl_runs.RESULTS.read_text())
    runs = [run for run in found["runs"] if run["name"] == name]
    if found.get("command") != rl_runs.COMMAND or any(not run.get("commit") for run in runs):
        raise NotMeasured(f"{rl_runs.RESULTS.name} does not say what it is of")
    if len(runs) < SEEDS:
        raise NotMeasured(f"{len(runs)} of {SEEDS} runs of {name} are finished")
    return runs


def noted(run: Run, values: list[float]) -> list[float]:
    run.note(", ".join(f"{value:.4g}" for value in values))
    return values


def minutes(run: Run) -> float:
    return max(noted(run, [r["loop_seconds"] / 60 for r in results("demo")]))


def base_minutes(run: Run) -> float:
    return max(noted(run, [r["base_seconds"] / 60 for r in results("demo")]))


def parsed(run: Run) -> float:
    return min(noted(run, [100 * r["before"]["parsed"] for r in results("demo")]))


def solved(run: Run) -> float:
    return min(noted(run, [100 * r["before"]["mean"] for r in results("demo")]))


def heldout(run: Run) -> float:
    return min(r["before"]["tasks"] for r in results("demo"))


def points(run: Run) -> float:
    return min(noted(run, [100 * r["gains"]["mean"][0] for r in results("demo")]))


def errors(key: str, run: Run) -> float:
    """Standard errors, paired by task, of the smallest gain of the seeds."""
    gains = [r["gains"][key] for r in results("demo")]
    run.note(", ".join(f"{100 * difference:+.1f} ± {100 * error:.1f} points" for difference, error in gains))
    return min(difference / error if error else math.copysign(math.inf, difference) for difference, error in gains)


def monotone(run: Run) -> float:
    """Pairs of neighbouring budgets of which the one with the lower held-out loss has no higher reward after."""
    found = []
    for steps in rl_runs.BUDGETS:
        runs = results(f"budget-{steps}")
        loss = math.fsum(r["heldout_loss"] for r in runs) / len(runs)
        found.append((loss, math.fsum(r["after"]["mean"] for r in runs) / len(runs)))
    run.note("; ".join(f"loss {loss:.3f}: {reward:.3f}" for loss, reward in found))
    found.sort(reverse=True)
    return sum(a[1] >= b[1] for a, b in pairwise(found))


BARS = [
    Bar("demo: the loop", "<", 12, "minutes", minutes),
    Bar("demo: making the base", "<", 12, "minutes", base_minutes),
    Bar("demo: calls that parse before", ">=", 95, "%", parsed),
    Bar("demo: held-out tasks solved before, mean", ">=", 10, "%", solved),
    Bar("demo: held-out tasks", ">=", 200, "tasks", heldout),
    Bar(f"demo: gain of the mean, least of {SEEDS} seeds", ">=", 15, "points", points),
    Bar(f"demo: gain of the mean over its error, least of {SEEDS} seeds", ">", 2, "standard errors", partial(errors, "mean")),
    Bar(f"demo: gain of the best of 8 over its error, least of {SEEDS} seeds", ">", 2, "standard errors", partial(errors, "best")),
    Bar("reward against held-out loss over three budgets", "<=", 0, "pairs out of order", monotone),
]
