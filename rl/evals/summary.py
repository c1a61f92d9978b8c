"""What a run comes to, and whether two differ."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from rl.evals.runner import RUN, Result, read_results, scores
from rl.evals.statistics import Comparison, Estimate, best_of_k, compare, estimate


@dataclass(frozen=True)
class Summary:
    """One run. Costs and tokens are means over attempts, the time is their median; `best[k - 1]` is best-of-k."""

    name: str
    directory: Path
    pins: dict
    results: list[Result]
    average: Estimate | None  # None: no attempt has a score
    best: tuple[Estimate, ...]
    tokens: float
    prompt_tokens: float
    seconds: float
    calls: float
    cost: float | None
    errors: int  # attempts without a score


def summarize(directory: str | Path) -> Summary:
    """Reads a run's directory. Raises ValueError where there is none."""
    directory = Path(directory)
    try:
        pins = json.loads((directory / RUN).read_text())
        results = read_results(directory)
        name = f"{pins['model']}{pins['version'] and ' ' + pins['version']}"
        if not isinstance(pins["tasks"], dict) or not isinstance(pins["suite"], str):
            raise TypeError(f"{RUN} without suite or tasks")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory}: expected the directory of a run, got {type(error).__name__}: {error}") from None
    graded = [result for result in results if result.score is not None]
    found = scores(results)
    most = min(map(len, found.values()), default=0)
    costs = [result.cost for result in graded if result.cost is not None]

    def mean(values) -> float:
        values = list(values)
        return statistics.fmean(values) if values else 0.0

    return Summary(
        name,
        directory,
        pins,
        results,
        estimate(found) if found else None,
        tuple(estimate(found, best_of_k, k) for k in range(1, most + 1)),
        mean(result.completion_tokens for result in graded),
        mean(result.prompt_tokens for result in graded),
        statistics.median([result.seconds for result in graded] or [0.0]),
        mean(result.calls for result in graded),
        mean(costs) if costs else None,
        len(results) - len(graded),
    )


def differs(first: Summary, second: Summary) -> Comparison | None:
    """The second run against the first over the tasks, of equal digest, that both have scores of; None if fewer than two."""
    a, b = scores(first.results), scores(second.results)
    pinned = [summary.pins["tasks"] for summary in (first, second)]
    both = [task for task in a if task in b and pinned[0].get(task) == pinned[1].get(task)]
    if len(both) < 2:
        return None
    return compare({task: a[task] for task in both}, {task: b[task] for task in both})


def pareto(points: list[tuple[float, float]]) -> list[int]:
    """Which (cost, accuracy) no other beats: none is cheaper and at least as good, or as cheap and better; by cost."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    front, best = [], -1.0
    for i in order:
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return front


def percent(value: Estimate | None) -> str:
    return "-" if value is None else f"{100 * value.mean:.1f} ({100 * value.low:.1f} to {100 * value.high:.1f})"


def cells(summary: Summary) -> tuple[str, ...]:
    """One row of the table."""
    best = summary.best[-1] if len(summary.best) > 1 else None
    return (
        summary.name,
        summary.pins["suite"],
        percent(summary.average),
        f"{percent(best)} of {len(summary.best)}" if best else "-",
        f"{summary.tokens:,.0f}",
        f"{summary.seconds:.1f}",
        f"{summary.calls:.1f}",
        "-" if summary.cost is None else f"{summary.cost:.4f}",
        str(summary.errors),
    )


HEADS = ("model", "suite", "accuracy, % (95 %)", "best of k, %", "completion tokens", "seconds", "calls", "dollars", "errors")
