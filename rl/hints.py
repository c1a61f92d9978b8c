"""Textual hints on single turns, as a teacher: the same weights, shown the hint, say what the turn should have been.

    turn = hinted_turn(segment, 2, "The function is in b.py, not in a.py.", dialect)    # for `TrainSample.hints`
    turns = hints_of(trajectory, dialect)                                               # of the turns with an invalid call

What is trained is the turn as it was sampled, without the hint: each of its tokens' distributions moves towards the one that the
hint gives (`rl.objective.distillation_loss`), on that turn only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rl.harness.dialect import Dialect
from rl.harness.trajectory import Trajectory
from rl.segments import Segment


@dataclass(frozen=True)
class HintedTurn:
    """ids: all tokens up to a turn's end; hinted: the same with the hint before the turn; length: tokens of the turn."""

    ids: tuple[int, ...]
    hinted: tuple[int, ...]
    length: int

    @property
    def student(self) -> Segment:
        return marking(self.ids, self.length)

    @property
    def teacher(self) -> Segment:
        return marking(self.hinted, self.length)


def marking(ids: Sequence[int], length: int) -> Segment:
    """Tokens of which the last `length` are marked."""
    return Segment(list(ids), [False] * (len(ids) - length) + [True] * length)


def turns_of(segment: Segment) -> list[tuple[int, int]]:
    """(first, one past the last) of the runs of tokens that the model chose: its replies, in order."""
    edges = [i for i, (a, b) in enumerate(pairwise([False, *segment.mask, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def hinted_turn(segment: Segment, number: int, hint: str, dialect: Dialect) -> HintedTurn:
    """Turn `number` (from 0) of a segment, with a hint as the user's last message before it; of an empty one, no hint.

    Only the hint is encoded: all other tokens are the segment's. Raises ValueError for a turn that is not there, or one that does
    not begin where the dialect lets a reply begin.
    """
    turns = turns_of(segment)
    if not 0 <= number < len(turns):
        raise ValueError(f"number must be of the segment's {len(turns)} turns, got {number}")
    start, end = turns[number]
    before, turn = segment.ids[:start], segment.ids[start:end]
    opening = dialect.more([])
    if before[len(before) - len(opening) :] != opening:
        raise ValueError(f"segment must have the dialect's opening of a reply before turn {number}, got tokens of another")
    shown = [*before[: len(before) - len(opening)], *dialect.more([{"role": "user", "content": hint}])] if hint else before
    return HintedTurn((*before, *turn), (*shown, *turn), end - start)


def hints_of(trajectory: Trajectory, dialect: Dialect) -> tuple[HintedTurn, ...]:
    """Of every reply with an invalid call, the turn with what its tool answered told beforehand. Needs replies with token ids."""
    turns = []
    for step in trajectory.steps:
        wrong = [result.text for result in step.results if result.kind == "invalid"]
        if not wrong:
            continue
        before, own = step.reply.prompt_token_ids, step.reply.completion_token_ids
        if not before or not own:
            raise ValueError("trajectory must have the token ids of its replies, got one without")
        told = Segment([*before, *own], [False] * len(before) + [True] * len(own))
        turns.append(hinted_turn(told, 0, "Do not call so: " + " ".join(wrong), dialect))
    return tuple(turns)
