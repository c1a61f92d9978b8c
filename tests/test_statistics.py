"""Scores of evaluations against closed forms, enumeration and simulation."""

import itertools
import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rl.evals.statistics import avg_at_k, best_of_k, compare, estimate, wilson

SCORES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(SCORES, st.data())
def test_best_of_k_is_the_mean_over_all_draws(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    draws = list(itertools.combinations(scores, k))
    assert best_of_k(scores, k) == pytest.approx(fmean(max(draw) for draw in draws), abs=1e-12)
    assert avg_at_k(scores, k) == pytest.approx(fmean(fmean(draw) for draw in draws), abs=1e-12)


@given(st.integers(1, 60), st.data())
def test_best_of_k_of_zeros_and_ones_is_pass_at_k(passes, data):
    solved, k = data.draw(st.integers(0, passes)), data.draw(st.integers(1, passes))
    scores = [1.0] * solved + [0.0] * (passes - solved)
    assert best_of_k(scores, k) == pytest.approx(1 - math.comb(passes - solved, k) / math.comb(passes, k), abs=1e-12)


def test_best_of_k_of_many_passes_does_not_overflow():
    assert best_of_k([0.0] * 9_999 + [1.0], 5_000) == pytest.approx(0.5)


@given(st.floats(0, 1), st.integers(1, 500), st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_solves_its_equation(mean, size, confidence):
    z = stats.norm.ppf(0.5 + confidence / 2)
    for bound in wilson(mean, size, confidence):
        assert size * (mean - bound) ** 2 == pytest.approx(z * z * bound * (1 - bound), rel=1e-6, abs=1e-9)


def test_one_pass_of_zeros_and_ones_has_nearly_wilsons_interval():
    scores = {str(i): [float(i < 30)] for i in range(100)}
    got, (low, high) = estimate(scores), wilson(0.3, 99, 0.95)
    assert (got.mean, got.tasks) == (0.3, 100)
    assert got.error == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert (got.low, got.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_equal_scores_leave_an_interval_of_so_few_tasks(score):
    got = estimate({str(i): [score] * 3 for i in range(10)})
    assert got.error == 0
    assert (got.low, got.high) == wilson(score, 10, 0.95)
    assert 0 <= got.low <= score <= got.high <= 1
    assert got.high - got.low > 0.2


@pytest.mark.parametrize(("tasks", "passes", "rate"), [(40, 1, 0.5), (40, 4, 0.3), (100, 2, 0.8)])
def test_intervals_hold_the_truth_as_often_as_they_say(tasks, passes, rate):
    rng, hits = np.random.default_rng(0), 0
    for _ in range(1000):
        difficulty = rng.beta(rate * 2, (1 - rate) * 2, size=tasks)
        drawn = rng.random((tasks, passes)) < difficulty[:, None]
        got = estimate({str(i): row.astype(float).tolist() for i, row in enumerate(drawn)})
        hits += got.low <= rate <= got.high
    assert 0.925 <= hits / 1000 <= 0.975


def test_comparison_is_the_paired_t_test():
    rng = np.random.default_rng(1)
    a, b = rng.random((30, 4)), rng.random((30, 4)) ** 0.8
    got = compare({str(i): row.tolist() for i, row in enumerate(a)}, {str(i): row.tolist() for i, row in enumerate(b)})
    expected = stats.ttest_rel(b.mean(1), a.mean(1))
    interval = expected.confidence_interval(0.95)
    assert got.p_value == pytest.approx(expected.pvalue)
    assert (got.low, got.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert got.significant == (expected.pvalue < 0.05)


def false_positives(runs: int, tasks: int = 60, passes: int = 4) -> float:
    """How often two agents that solve every task equally often are called different, at 95 %."""
    rng = np.random.default_rng(2)
    called = 0
    for _ in range(runs):
        difficulty = rng.beta(1.0, 1.2, size=(tasks, 1))
        first, second = ((rng.random((tasks, passes)) < difficulty).astype(float).tolist() for _ in range(2))
        called += compare(dict(enumerate(first)), dict(enumerate(second))).significant
    return called / runs


def test_equal_agents_are_rarely_called_different():
    assert 0.035 <= false_positives(1500) <= 0.065  # 5 % and 2.6 standard errors


def test_agents_without_scatter():
    same, better = {"a": [0.0], "b": [0.0]}, {"a": [1.0], "b": [1.0]}
    assert compare(same, same).p_value == 1
    assert not compare(same, same).significant
    assert compare(same, better).p_value == 0
    assert compare({task: [0.1] * 3 for task in "ab"}, {task: [0.1] for task in "ab"}).p_value == 1  # equal but for rounding
    assert compare(same, better).significant


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_of_k([1.0], 2), "k: expected 1 to 1"),
        (lambda: avg_at_k([], 1), "k: expected 1 to 0"),
        (lambda: avg_at_k([math.nan], 1), r"scores: expected numbers in \[0, 1\], got nan"),
        (lambda: avg_at_k([1.5], 1), "got 1.5"),
        (lambda: estimate({}), "at least one task"),
        (lambda: estimate({"a": []}), "none of 'a'"),
        (lambda: estimate({"a": [1.0]}, confidence=95), "confidence: expected a number between 0 and 1, got 95"),
        (lambda: compare({"a": [1.0]}, {"b": [1.0]}), "expected the tasks of first, got 'a'"),
        (lambda: compare({"a": [1.0]}, {"a": [1.0]}), "at least two tasks"),
    ],
)
def test_bad_scores_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), SCORES, min_size=1, max_size=12), st.floats(0.5, 0.99))
def test_intervals_contain_the_mean(scores, confidence):
    got = estimate(scores, best_of_k, 1, confidence)
    assert 0 <= got.low <= got.mean <= got.high <= 1
