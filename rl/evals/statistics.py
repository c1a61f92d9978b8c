"""What scores mean: averages over tasks, best-of-k, intervals, and whether two agents differ.

A suite is a list of tasks, each tried in several passes; a score is a number in [0, 1]. Passes of one task are not independent
samples of the suite, so the task is the unit: every estimate is a mean over tasks of a statistic of one task's passes, and its
error comes from the scatter between tasks (Miller, "Adding Error Bars to Evals", arXiv 2411.00640, section 2). Two agents are
compared on the same tasks, by the differences task by task (section 4.2 there).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

Scores = Mapping[str, Sequence[float]]  # by task: the scores of its passes


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its interval, all in [0, 1]."""

    mean: float
    low: float
    high: float
    error: float  # standard error of the mean, from the scatter between tasks
    tasks: int
    confidence: float


@dataclass(frozen=True)
class Comparison:
    """How much higher the second agent scores than the first, in [-1, 1]."""

    difference: float
    low: float
    high: float
    p_value: float  # two-sided: how often equal agents would differ by as much
    tasks: int

    @property
    def significant(self) -> bool:
        """At the confidence of the interval: it does not contain zero."""
        return self.low > 0 or self.high < 0


def checked_pass(scores: Sequence[float], k: int) -> list[float]:
    if not 1 <= k <= len(scores):
        raise ValueError(f"k: expected 1 to {len(scores)}, the number of passes, got {k}")
    for score in scores:
        if not 0 <= score <= 1:  # NaN too
            raise ValueError(f"scores: expected numbers in [0, 1], got {score}")
    return sorted(scores)


def avg_at_k(scores: Sequence[float], k: int) -> float:
    """Expected mean of k passes drawn without replacement: the mean of all, whatever k is.

    Raises ValueError for k outside 1 to the number of passes, and for scores outside [0, 1].
    """
    return math.fsum(checked_pass(scores, k)) / len(scores)


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Expected best of k passes drawn without replacement; unbiased for the best of k new ones.

    The i-th smallest of n scores is the best of C(i - 1, k - 1) of the C(n, k) draws. Of scores that are 0 or 1 this is pass@k,
    1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, equation 1). Raises as `avg_at_k`.
    """
    ordered = checked_pass(scores, k)
    share, terms = k / len(ordered), []  # of the draws whose best is the i-th smallest, from the largest down
    for i in range(len(ordered), k - 1, -1):
        terms.append(share * ordered[i - 1])
        share *= (i - k) / max(i - 1, 1)
    return math.fsum(terms)


def wilson(mean: float, size: float, confidence: float) -> tuple[float, float]:
    """Wilson's score interval of a share seen in `size` independent samples (JASA 22, 1927)."""
    z = stats.norm.ppf(0.5 + confidence / 2)
    centre = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(max(mean * (1 - mean), 0.0) / size + z * z / (4 * size * size))
    return float(min(max(centre - half, 0.0), mean)), float(
        max(min(centre + half, 1.0), mean)
    )  # rounding is not to exclude the mean


def checked(scores: Scores, confidence: float) -> None:
    if not scores:
        raise ValueError("scores: expected at least one task, got none")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, got {confidence}")
    for task, passes in scores.items():
        if not passes:
            raise ValueError(f"scores: expected at least one pass of every task, got none of {task!r}")


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    n = len(values)
    mean = math.fsum(values) / n
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n) if n > 1 else math.inf


def estimate(
    scores: Scores, statistic: Callable[[Sequence[float], int], float] = avg_at_k, k: int = 1, confidence: float = 0.95
) -> Estimate:
    """Mean over tasks of `statistic(passes, k)` with its interval.

    The interval is Wilson's with the number of samples that would scatter as the tasks do, mean (1 - mean) / error^2: it stays in
    [0, 1], and tasks that all score alike leave it the width that so few tasks allow. Raises ValueError for no task or pass, k
    larger than a task's passes, scores outside [0, 1], and a confidence outside (0, 1).
    """
    checked(scores, confidence)
    values = [statistic(passes, k) for passes in scores.values()]
    mean, error = spread(values)
    size = len(values)
    if 0 < error < math.inf:  # scores between 0 and 1 scatter less than shares do: then they are worth more samples
        size = max(mean * (1 - mean) / error**2, 1.0)
    return Estimate(mean, *wilson(mean, size, confidence), error, len(values), confidence)


def compare(first: Scores, second: Scores, confidence: float = 0.95) -> Comparison:
    """The second agent's mean score less the first's, over the same tasks: paired t interval and test.

    Raises ValueError where the tasks differ or are fewer than two, and as `estimate`.
    """
    checked(first, confidence)
    checked(second, confidence)
    if set(first) != set(second):
        odd = sorted(set(first) ^ set(second))[0]
        raise ValueError(f"second: expected the tasks of first, got {odd!r} in one of the two only")
    if len(first) < 2:
        raise ValueError("first: expected at least two tasks, got one")
    # averages of equal scores over unequal numbers of passes differ by rounding, which is no difference
    differences = [round(avg_at_k(second[task], 1) - avg_at_k(first[task], 1), 12) for task in first]
    mean, error = spread(differences)
    if error == 0:
        return Comparison(mean, mean, mean, 1.0 if mean == 0 else 0.0, len(differences))
    degrees = len(differences) - 1
    half = float(stats.t.ppf(0.5 + confidence / 2, degrees)) * error
    return Comparison(mean, mean - half, mean + half, 2 * float(stats.t.sf(abs(mean) / error, degrees)), len(differences))
