"""What a sample earns: the verifier's result, less what its effort costs, with named rewards and penalties for behaviour.

    reward = solved - effort_weight * C(effort) - sum of the named parts

The learner takes kl_weight * KL(k1) off, for it has the reference (`rl.objective.kl_penalty`). An infrastructure failure earns
nothing, not zero: `Reward.valid` is False, and the sample is of no part in its group.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rl.harness.trajectory import Trajectory


def length_penalty(effort: float, k: float, q: float) -> float:
    """C_{k,q}(x) = ((1 + k x)^(1-q) - 1) / (k (1 - q)), log(1 + k x) / k at q = 1: slope 1 at 0, then ever flatter for q > 0.

    More effort costs more on easy tasks, where every step is a large part of it, than on long ones. Raises ValueError for a
    negative effort, k <= 0 or q < 0.
    """
    if effort < 0 or not k > 0 or q < 0 or not math.isfinite(effort):
        raise ValueError(f"expected a finite effort >= 0, k > 0 and q >= 0, got {effort}, {k} and {q}")
    grown = math.log1p(k * effort)
    # expm1 keeps the limit q -> 1 exact: ((1 + kx)^(1-q) - 1) / (1-q) = expm1((1-q) log(1 + kx)) / (1-q)
    return (math.expm1((1 - q) * grown) / (1 - q) if q != 1 else grown) / k


@dataclass(frozen=True)
class EffortWeights:
    """What each kind of work weighs, per token, call or turn."""

    thinking_token: float = 1e-3
    call_token: float = 1e-3
    output_token: float = 1e-4
    final_token: float = 1e-3
    call: float = 0.02
    turn: float = 0.05


@dataclass(frozen=True)
class Effort:
    """Counts of one run. final_tokens: of the last message, which has no calls."""

    thinking_tokens: int = 0
    call_tokens: int = 0
    output_tokens: int = 0
    final_tokens: int = 0
    calls: int = 0
    turns: int = 0

    def weighted(self, w: EffortWeights) -> float:
        return (
            w.thinking_token * self.thinking_tokens
            + w.call_token * self.call_tokens
            + w.output_token * self.output_tokens
            + w.final_token * self.final_tokens
            + w.call * self.calls
            + w.turn * self.turns
        )


def effort_of(trajectory: Trajectory, count: Callable[[str], int]) -> Effort:
    """What a run took. count: tokens of a text, by the model's tokenizer."""
    replies = trajectory.replies
    final = replies[-1].text if replies and not replies[-1].calls else ""
    texts = sum(count(r.text) for r in replies) - count(final)
    return Effort(
        thinking_tokens=sum(count(r.thinking) for r in replies) + texts,
        call_tokens=sum(count(call.name) + count(call.arguments) for call, _ in trajectory.calls),
        output_tokens=sum(count(result.text) for _, result in trajectory.calls),
        final_tokens=count(final),
        calls=len(trajectory.calls),
        turns=len(replies),
    )


# Behaviours: each a share from 0 to 1 of how much a run shows it.

_MUSING = re.compile(r"(#|//|/\*|\*|--)\s*(hmm|wait|let me|let's see|i think|i need to|i should|actually,|maybe i|now i)\b", re.I)
_EDITS = {"edit_file", "edit_line", "write_file", "apply_patch", "delete_file"}
_TERMINAL = {"shell", "shell_output", "shell_kill", "run_check"}


def open_todos(t: Trajectory) -> float:
    """To-do entries left pending or in progress."""
    return sum(entry.get("status") in ("pending", "in_progress") for entry in t.todos) / len(t.todos) if t.todos else 0.0


def invalid_calls(t: Trajectory) -> float:
    """Calls of no tool, or with arguments that its schema refuses."""
    return sum(result.kind == "invalid" for _, result in t.calls) / len(t.calls) if t.calls else 0.0


def failed_calls(t: Trajectory) -> float:
    """Calls that were well formed and refused: no such file, no such line, an edit that changes nothing."""
    return sum(result.kind == "error" for _, result in t.calls) / len(t.calls) if t.calls else 0.0


def terminal_only(t: Trajectory) -> float:
    """1 where a run of three calls or more used the terminal for all of them, though it has tools to edit with."""
    names = {call.name for call, _ in t.calls}
    others = {tool["function"]["name"] for tool in t.tools} & _EDITS
    return float(len(t.calls) >= 3 and bool(others) and names <= _TERMINAL)


def thinking_in_comments(t: Trajectory) -> float:
    """Edits that carry a chain of thought as comments."""
    edits = [call for call, _ in t.calls if call.name in _EDITS]
    return sum(bool(_MUSING.search(call.arguments)) for call in edits) / len(edits) if edits else 0.0


def needless_questions(t: Trajectory) -> float:
    """1 for a run that asked and changed nothing."""
    names = [call.name for call, _ in t.calls]
    return float("ask_user" in names and not _EDITS & set(names))


BEHAVIOURS: dict[str, Callable[[Trajectory], float]] = {
    f.__name__: f for f in (open_todos, invalid_calls, failed_calls, terminal_only, thinking_in_comments, needless_questions)
}


def behaviours_of(t: Trajectory) -> dict[str, float]:
    """The share of every behaviour, by name."""
    return {name: behaviour(t) for name, behaviour in BEHAVIOURS.items()}


@dataclass(frozen=True)
class RewardWeights:
    """length_k, length_q: of `length_penalty`. behaviours: what a whole share of each costs."""

    effort: float = 0.05
    length_k: float = 1.0
    length_q: float = 0.5
    behaviours: Mapping[str, float] = field(
        default_factory=lambda: {"open_todos": 0.1, "invalid_calls": 0.1, "terminal_only": 0.05}
    )
    effort_weights: EffortWeights = EffortWeights()

    def __post_init__(self):
        if unknown := sorted(set(self.behaviours) - set(BEHAVIOURS)):
            raise ValueError(f"behaviours must be of {', '.join(BEHAVIOURS)}, got {', '.join(unknown)}")


@dataclass(frozen=True)
class Reward:
    """parts: what it is made of; `total`: their sum. valid: False: a failure not the policy's, of no part in the group."""

    parts: Mapping[str, float]
    valid: bool = True
    error: str = ""

    @property
    def total(self) -> float | None:
        return math.fsum(self.parts.values()) if self.valid else None


def reward_of(
    trajectory: Trajectory,
    solved: float | None,
    effort: Effort,
    weights: RewardWeights | None = None,
    error: str = "",
) -> Reward:
    """The reward of a run.

    solved: the verifier's result from 0 to 1; None: it gave none, or the sandbox or the model failed (`error` says how).
    effort: see `effort_of`. Raises ValueError for a result outside 0 to 1.
    """
    if solved is None or trajectory.end in ("sandbox_error", "model_error"):
        return Reward({}, valid=False, error=error or trajectory.error or "no result")
    if not 0 <= solved <= 1:
        raise ValueError(f"solved must be from 0 to 1, got {solved}")
    w = weights or RewardWeights()
    penalty = length_penalty(effort.weighted(w.effort_weights), w.length_k, w.length_q)
    parts = {"solved": float(solved), "effort": -w.effort * penalty}
    return Reward(parts | {name: -cost * BEHAVIOURS[name](trajectory) for name, cost in w.behaviours.items()})


@dataclass
class Monitor:
    """Watches the mean share of every behaviour, and says where one has risen.

    limit: of the mean. rise: over the mean of the first `window` runs. Alarms are for people to read: they never change a reward.
    first, last: shares of so many runs, by behaviour; JSON of `state` restores them.
    """

    limit: float = 0.3
    rise: float = 0.15
    window: int = 64
    first: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in BEHAVIOURS})
    last: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in BEHAVIOURS})

    def add(self, shares: Mapping[str, float]) -> None:
        """Takes a run's shares in (see `behaviours_of`)."""
        for name, share in shares.items():
            self.first[name] = [*self.first[name], share][: self.window]
            self.last[name] = [*self.last[name], share][-self.window :]

    @property
    def alarms(self) -> list[str]:
        """What there is to say of the last `window` runs; nothing while there are fewer."""
        found = []
        for name, shares in self.last.items():
            if len(shares) < self.window:
                continue
            last, first = (math.fsum(part) / self.window for part in (shares, self.first[name]))
            if last > self.limit or last - first > self.rise:
                found.append(f"{name}: {last:.2f} of the last {self.window} runs, {first:.2f} of the first")
        return found

    @property
    def state(self) -> dict[str, dict[str, list[float]]]:
        return {"first": self.first, "last": self.last}
