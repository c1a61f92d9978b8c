"""What scores mean: estimators against closed forms, intervals and comparisons against simulation."""

import math
from itertools import combinations

import numpy as np

from benchmarks.bars.harness import Bar, Run
from rl.evals.statistics import avg_at_k, best_of_k, compare, estimate


def worst_estimator(run: Run) -> float:
    """Largest difference of avg@k and best-of-k from the mean over all draws, and of pass@k from its formula."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in run.steps(range(run.count(2000, 20))):
        n = int(rng.integers(1, 9))
        k = int(rng.integers(1, n + 1))
        scores = list(rng.random(n)) if rng.random() < 0.5 else list(rng.integers(0, 2, n).astype(float))
        draws = list(combinations(scores, k))
        worst = max(worst, abs(avg_at_k(scores, k) - np.mean([np.mean(d) for d in draws])))
        worst = max(worst, abs(best_of_k(scores, k) - np.mean([max(d) for d in draws])))
        if {*scores} <= {0.0, 1.0}:
            c = int(sum(scores))
            worst = max(worst, abs(best_of_k(scores, k) - (1 - math.comb(n - c, k) / math.comb(n, k))))
    return worst


def false_positives(run: Run) -> float:
    """% of comparisons of two equal agents, over 60 tasks with four passes each, that are called significant at 95 %."""
    rng = np.random.default_rng(1)
    count, found = run.count(10_000, 100), 0
    for _ in run.steps(range(count)):
        rates = rng.beta(0.6, 0.8, 60)
        first, second = ((rng.random((60, 4)) < rates[:, None]).astype(float) for _ in range(2))
        names = [str(i) for i in range(60)]
        found += compare(dict(zip(names, first, strict=True)), dict(zip(names, second, strict=True))).significant
    return 100 * found / count


def coverage(run: Run) -> float:
    """% of 95 % intervals of an average over 60 tasks that hold the true one."""
    rng = np.random.default_rng(2)
    count, found = run.count(4000, 100), 0
    truth = 0.6 / 1.4
    for _ in run.steps(range(count)):
        rates = rng.beta(0.6, 0.8, 60)
        passes = (rng.random((60, 4)) < rates[:, None]).astype(float)
        e = estimate({str(i): row for i, row in enumerate(passes)})
        found += e.low <= truth <= e.high
    return 100 * found / count


BARS = [
    Bar("estimators against all draws, largest error", "<=", 1e-12, "", worst_estimator),
    Bar("equal agents called different, at least", ">=", 4, "%", false_positives),
    Bar("equal agents called different, at most", "<=", 6, "%", false_positives),
    Bar("intervals that hold the true average, at least", ">=", 93, "%", coverage),
]
