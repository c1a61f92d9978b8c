"""Hints on single turns: what the teacher reads, and the gradient against a closed form."""

import copy
import math

import pytest
import torch

from rl.harness.dialect import ChatDialect, TerseDialect
from rl.harness.model import Reply
from rl.harness.schema import ToolResult, ToolSet
from rl.harness.trajectory import Step, Trajectory
from rl.hints import HintedTurn, hinted_turn, hints_of, turns_of
from rl.learner import TrainSample
from rl.segments import Segment, segments_of
from tests.test_dialect import vocabulary
from tests.test_learner import REWARDS, answer_of, groups_of, learner_of, sampled
from tests.test_sampler import wide_model
from training.data.tokenizer import FAMILIES

ASKED = [{"role": "system", "content": "You are."}, {"role": "user", "content": "Fix it."}]


@pytest.mark.parametrize("make", [ChatDialect, TerseDialect])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.messages], ids=["own", "deepseek", "kimi", "qwen"])
def test_the_teacher_reads_the_conversation_with_the_hint(make, family):
    """As the dialect writes it with one message more, before the first turn and before the second."""
    dialect = make(vocabulary(family))
    hint = {"role": "user", "content": "It is in b.py."}
    first = [*dialect.vocabulary.encode("a"), dialect.turn]
    start = dialect.prompt(ASKED, [])
    more = dialect.more([{"role": "tool", "content": "gone"}])
    second = [*dialect.vocabulary.encode("bc"), dialect.turn]
    (segment,) = segments_of([answer_of(start, first), answer_of([*start, *first, *more], second)])
    assert turns_of(segment) == [(len(start), len(start) + len(first)), (len(segment.ids) - len(second), len(segment.ids))]
    turn = hinted_turn(segment, 0, hint["content"], dialect)
    assert turn == HintedTurn((*start, *first), (*dialect.prompt([*ASKED, hint], []), *first), len(first))
    turn = hinted_turn(segment, 1, hint["content"], dialect)
    told = dialect.more([{"role": "tool", "content": "gone"}, hint])
    assert turn == HintedTurn(tuple(segment.ids), (*start, *first, *told, *second), len(second))
    empty = hinted_turn(segment, 1, "", dialect)
    assert empty.hinted == empty.ids == tuple(segment.ids)
    with pytest.raises(ValueError, match="number must be of the segment's 2 turns, got 2"):
        hinted_turn(segment, 2, "x", dialect)
    with pytest.raises(ValueError, match="opening of a reply before turn 0"):
        hinted_turn(Segment([1, 2], [False, True]), 0, "x", dialect)


def test_a_turn_with_an_invalid_call_is_told_what_its_tool_said():
    dialect = ChatDialect(vocabulary(FAMILIES[0]))
    start, reply = dialect.prompt(ASKED, []), [*dialect.vocabulary.encode("a"), dialect.turn]
    more = dialect.more([{"role": "tool", "content": "gone"}])
    tools = ToolSet([])
    wrong = tools.call(None, "fly", {})

    def step(before, result):
        told = Reply(prompt_token_ids=tuple(before), completion_token_ids=tuple(reply))
        return Step("agent", told, (result,))

    second = [*start, *reply, *more]
    steps = [step(start, ToolResult("gone")), step(second, wrong), step(start, ToolResult("no", "error"))]
    trajectory = Trajectory("m", [], "", steps)
    hint = {"role": "user", "content": f"Do not call so: {wrong.text}"}
    told = dialect.more([{"role": "tool", "content": "gone"}, hint])
    assert hints_of(trajectory, dialect) == (HintedTurn((*second, *reply), (*start, *reply, *told, *reply), len(reply)),)
    with pytest.raises(ValueError, match="token ids of its replies"):
        hints_of(Trajectory("m", [], "", [Step("agent", Reply(), (wrong,))]), dialect)


TURNS = (
    HintedTurn((5, 6, 7, 8, 9), (5, 20, 21, 6, 7, 8, 9), 3),
    HintedTurn((5, 6, 3), (5, 30, 6, 3), 1),
    HintedTurn((5, 6, 11, 12), (5, 6, 11, 12), 2),  # no hint
)


@pytest.mark.parametrize("micro_tokens", [1, 10_000])
def test_the_gradient_is_that_of_the_turns_alone(micro_tokens):
    """Rewards are equal, so that hints alone move the weights: sum of p (log p - log q), by hand, one turn at a time."""
    model = wide_model()
    by_hand = copy.deepcopy(model)
    total = 0.0
    for turn in TURNS[:2]:
        with torch.no_grad():
            q = (by_hand(torch.tensor(turn.hinted)[None])[0][0, -turn.length - 1 : -1].float() / 0.9).log_softmax(1)
        p = (by_hand(torch.tensor(turn.ids)[None])[0][0, -turn.length - 1 : -1].float() / 0.9).log_softmax(1)
        kl = (p.exp() * (p - q)).sum() / 4
        (0.5 * kl).backward()
        total += float(kl.detach())
    groups = groups_of(sampled(model), [0.5] * 8)
    groups[0][1] = TrainSample(groups[0][1].segments, 0.5, TURNS)
    learner, optimizer = learner_of(model, hint_weight=0.5, micro_tokens=micro_tokens)
    report = learner.step(groups)
    assert report.hint_kl == pytest.approx(total, rel=1e-4)
    assert total > 0.1
    assert not report.skipped
    for (name, p), found in zip(by_hand.named_parameters(), optimizer.seen, strict=True):
        assert torch.allclose(found, p.grad, rtol=1e-3, atol=1e-6 * max(1.0, float(p.grad.abs().max()))), name


@pytest.mark.parametrize(("weight", "reward", "turns"), [(0.5, 0.5, TURNS[2:]), (0.0, 0.5, TURNS), (0.5, None, TURNS)])
def test_no_hint_no_loss(weight, reward, turns):
    """Nor where its weight is zero, or its run counts for nothing."""
    model = wide_model()
    groups = groups_of(sampled(model), [0.5] * 8)
    groups[0][1] = TrainSample(groups[0][1].segments, reward, turns)
    learner, _ = learner_of(model, hint_weight=weight)
    report = learner.step(groups)
    assert (report.hint_kl, report.skipped, report.gradient_norm) == (None, True, 0.0)


def test_steps_on_a_hint_bring_the_turn_to_what_it_says():
    model = wide_model()
    groups = groups_of(sampled(model), REWARDS)
    groups[0] = [TrainSample(groups[0][0].segments, 0.5, TURNS[:1])] * 2
    learner, _ = learner_of(model, hint_weight=1.0, lr=0.01)
    seen = [learner.step(groups[:1]).hint_kl for _ in range(8)]
    assert seen[-1] < seen[0]
    assert all(math.isfinite(kl) for kl in seen)
