"""Rewards and their parts, by hand; what is no fault of the policy's is no reward."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.harness.model import Call, Reply
from rl.harness.schema import ToolResult
from rl.harness.trajectory import Step, Trajectory
from rl.rewards import (
    BEHAVIOURS,
    Effort,
    EffortWeights,
    Monitor,
    RewardWeights,
    behaviours_of,
    effort_of,
    length_penalty,
    reward_of,
)

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("shell", "edit_file", "ask_user")]


def run_of(*calls, todos=(), end="finished", final=""):
    """A run that makes one call a turn: (name, arguments, kind of result)."""
    steps = [
        Step("agent", Reply(text="go on", thinking="a b", calls=(Call(str(i), name, arguments),)), (ToolResult("out put", kind),))
        for i, (name, arguments, kind) in enumerate(calls)
    ]
    if final:
        steps.append(Step("agent", Reply(text=final)))
    return Trajectory("m", TOOLS, "", steps, end, todos=list(todos))


@given(st.floats(0, 1e4), st.floats(1e-3, 10), st.floats(0, 3))
def test_length_penalty_is_the_integral_of_its_slope(x, k, q):
    """C' = (1 + k x)^-q, by Gauss-Legendre over the logarithm."""
    found = length_penalty(x, k, q)
    assert 0 <= found <= x * (1 + 1e-12) + 1e-300
    assert length_penalty(x * 1.1, k, q) >= found
    top = math.log1p(k * x)
    nodes = 400  # midpoint rule over u = log(1 + kx): integral of exp((1 - q) u) du / k
    area = math.fsum(math.exp((1 - q) * (i + 0.5) * top / nodes) for i in range(nodes)) * top / nodes / k
    assert found == pytest.approx(area, rel=1e-3, abs=1e-9)


def test_length_penalty_near_q_1():
    assert length_penalty(7.0, 0.5, 1.0) == pytest.approx(math.log(4.5) / 0.5, rel=1e-15)
    assert length_penalty(7.0, 0.5, 1 + 1e-12) == pytest.approx(length_penalty(7.0, 0.5, 1.0), rel=1e-9)
    assert length_penalty(7.0, 0.5, 0.0) == pytest.approx(7.0)
    for bad in ((-1, 1, 1), (1, 0, 1), (1, 1, -1), (math.nan, 1, 1), (math.inf, 1, 1)):
        with pytest.raises(ValueError, match="expected a finite effort"):
            length_penalty(*bad)


def test_effort_is_counted_by_kind():
    t = run_of(("edit_file", "x y z", "ok"), ("edit_file", "x", "error"), final="all is done")
    found = effort_of(t, lambda text: len(text.split()))
    assert found == Effort(thinking_tokens=8, call_tokens=6, output_tokens=4, final_tokens=3, calls=2, turns=3)
    assert found.weighted(EffortWeights(1, 10, 100, 1000, 1e4, 1e5)) == 8 + 60 + 400 + 3000 + 2e4 + 3e5


def test_behaviours():
    edit, shell = ("edit_file", "{}", "ok"), ("shell", "{}", "ok")
    cases = {
        "open_todos": (run_of(todos=[{"status": "pending"}, {"status": "completed"}]), 0.5),
        "invalid_calls": (run_of(edit, ("edit_file", "{", "invalid")), 0.5),
        "failed_calls": (run_of(edit, edit, ("edit_line", "{}", "error"), ("edit_file", "{", "invalid")), 0.25),
        "terminal_only": (run_of(shell, shell, shell), 1.0),
        "thinking_in_comments": (run_of(("edit_file", "# wait, let me see", "ok"), edit), 0.5),
        "needless_questions": (run_of(("ask_user", "{}", "ok")), 1.0),
    }
    assert cases.keys() == BEHAVIOURS.keys()
    for name, (t, share) in cases.items():
        assert BEHAVIOURS[name](t) == share
        assert BEHAVIOURS[name](run_of()) == 0
    assert BEHAVIOURS["terminal_only"](run_of(shell, shell, edit)) == 0
    assert BEHAVIOURS["needless_questions"](run_of(("ask_user", "{}", "ok"), edit)) == 0


def test_the_parts_of_a_reward():
    t = run_of(("edit_file", "{", "invalid"), todos=[{"status": "pending"}])
    weights = RewardWeights(effort=0.5, length_k=1, length_q=1, behaviours={"open_todos": 0.2, "invalid_calls": 0.3})
    found = reward_of(t, 1.0, Effort(calls=1, turns=2), weights)
    effort = -0.5 * math.log(1 + 0.02 + 0.1)
    assert found.parts == pytest.approx({"solved": 1.0, "effort": effort, "open_todos": -0.2, "invalid_calls": -0.3})
    assert found.total == pytest.approx(1 + effort - 0.5)


@pytest.mark.parametrize(("end", "solved"), [("finished", None), ("sandbox_error", 1.0), ("model_error", 0.0)])
def test_an_infrastructure_failure_is_no_reward(end, solved):
    found = reward_of(run_of(end=end), solved, Effort(), error="disk")
    assert not found.valid
    assert found.total is None
    assert found.error == "disk"


def test_errors():
    with pytest.raises(ValueError, match="solved must be from 0 to 1, got 2"):
        reward_of(run_of(), 2, Effort())
    with pytest.raises(ValueError, match=r"behaviours must be of .* got swearing"):
        RewardWeights(behaviours={"swearing": 1})


def test_a_monitor_tells_of_a_behaviour_that_rises():
    monitor = Monitor(limit=0.9, rise=0.2, window=10)
    good, bad = run_of(("edit_file", "{}", "ok")), run_of(*[("shell", "{}", "ok")] * 3)
    alarms = []
    for t in [good] * 10 + [bad] * 10:
        monitor = Monitor(0.9, 0.2, 10, **json.loads(json.dumps(monitor.state)))  # as a run that goes on has it
        monitor.add(behaviours_of(t))
        alarms.append(monitor.alarms)
    assert [bool(found) for found in alarms[10:]] == [False, False] + [True] * 8
    assert not any(alarms[:10])
    assert alarms[12] == ["terminal_only: 0.30 of the last 10 runs, 0.00 of the first"]


@given(st.lists(st.floats(0, 1), max_size=40), st.integers(1, 8))
def test_a_monitor_keeps_two_windows(shares, window):
    monitor = Monitor(limit=0.5, rise=2.0, window=window)
    for share in shares:
        monitor.add({"open_todos": share})
    assert monitor.last["open_todos"] == shares[-window:]
    assert monitor.first["open_todos"] == shares[:window]
    assert bool(monitor.alarms) == (len(shares) >= window and math.fsum(shares[-window:]) / window > 0.5)
