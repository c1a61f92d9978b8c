"""Segments of runs, and the learner's step: against a closed form, in any packing, with the sampler's experts."""

import copy
import math

import numpy as np
import pytest
import torch

from rl.learner import Learner, TrainSample
from rl.objective import Correction, token_log_probs
from rl.sampler import Answer, Request, Sampler
from rl.segments import segments_of
from tests.test_sampler import config_of, wide_model
from training.model import Model


def answer_of(prompt, ids, version=0, experts=None):
    return Answer(Request(0, tuple(prompt), 99), list(ids), [-0.5] * len(ids), [version] * len(ids), experts)


def test_a05_turns_grow_one_sequence_and_nothing_is_encoded_again():
    """Sampled [0, 1] ("ab" would encode to [2]), then the tool says [3]."""
    (segment,) = segments_of([answer_of([9], [0, 1]), answer_of([9, 0, 1, 3], [2], version=1)])
    assert segment.ids == [9, 0, 1, 3, 2]
    assert segment.mask == [False, True, True, False, True]
    assert segment.log_probs == [0, -0.5, -0.5, 0, -0.5]
    assert segment.versions == [-1, 0, 0, -1, 1]
    assert segment.oldest == 0


def test_a_summary_begins_a_new_segment():
    found = segments_of([answer_of([1, 2], [3]), answer_of([1, 2, 3, 4], [5]), answer_of([1, 7], [8]), answer_of([1, 7, 8], [9])])
    assert [segment.ids for segment in found] == [[1, 2, 3, 4, 5], [1, 7, 8, 9]]
    assert [segment.mask for segment in found] == [[False, False, True, False, True], [False, False, True, True]]


def test_experts_of_tokens_read_in_a_later_turn():
    first = np.array([[[0]], [[1]], [[-1]]], np.int16)
    second = np.array([[[-1]], [[1]], [[2]], [[-1]]], np.int16)
    (segment,) = segments_of([answer_of([5], [6, 7], experts=first), answer_of([5, 6, 7], [8], experts=second)])
    assert segment.experts[:, 0, 0].tolist() == [0, 1, 2, -1]


def test_answers_that_do_not_fit_are_refused():
    bad = answer_of([1], [2, 3])
    bad.versions.pop()
    with pytest.raises(ValueError, match="got 2 tokens, 2 and 1"):
        segments_of([bad])


def sampled(model, n=8, recipe_seed=0):
    sampler = Sampler(model, num_slots=8, capacity=64)
    for i in range(n):
        sampler.submit(Request(i, tuple(range(1, 4 + i % 3)), 4 + i, sample=recipe_seed * 100 + i, temperature=0.9))
    return sorted(sampler.run(), key=lambda answer: answer.request.id)


def groups_of(answers, rewards, size=4):
    samples = [TrainSample(segments_of([answer]), reward) for answer, reward in zip(answers, rewards, strict=True)]
    return [samples[i : i + size] for i in range(0, len(samples), size)]


REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.5, None, 0.0]


def gradient_by_hand(model, groups, temperature):
    """One run at a time, advantages and normalisation written out."""
    total = sum(sum(segment.mask) for group in groups for s in group if s.reward is not None for segment in s.segments)
    model.zero_grad()
    for group in groups:
        valid = [s for s in group if s.reward is not None]
        mean = sum(s.reward for s in valid) / len(valid)
        for sample in valid:
            for segment in sample.segments:
                ids = torch.tensor(segment.ids)
                logits, _ = model(ids[None])
                log_probs = token_log_probs(logits[0, :-1], ids[1:], temperature)
                mask = torch.tensor(segment.mask[1:])
                (-(sample.reward - mean) / total * log_probs[mask].sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Recorder(torch.optim.SGD):
    """Keeps the gradient of the last step."""

    def step(self, closure=None):
        self.seen = [None if p.grad is None else p.grad.clone() for group in self.param_groups for p in group["params"]]
        return super().step(closure)


def learner_of(model, **options):
    optimizer = Recorder(model.parameters(), lr=0.1)
    return Learner(model, optimizer, **({"lr": 0.1, "clip_norm": math.inf, "temperature": 0.9} | options)), optimizer


@pytest.mark.parametrize("micro_tokens", [1, 20, 10_000])
def test_a_steps_gradient_is_the_closed_form_in_any_packing(micro_tokens):
    model = wide_model()
    groups = groups_of(sampled(model), REWARDS)
    expected = gradient_by_hand(copy.deepcopy(model), groups, 0.9)
    learner, optimizer = learner_of(model, correction=Correction("none"), micro_tokens=micro_tokens)
    report = learner.step(groups)
    for (name, _), found in zip(model.named_parameters(), optimizer.seen, strict=True):
        assert torch.allclose(found, expected[name], rtol=1e-4, atol=1e-6 * max(1.0, float(expected[name].abs().max()))), name
    assert report.invalid == 1
    assert report.tokens == sum(len(s.ids) for g in groups for x in g if x.reward is not None for s in x.segments) - sum(
        1 for g in groups for x in g if x.reward is not None for s in x.segments for m in s.mask if not m
    )
    assert report.mean_reward == pytest.approx(2.5 / 7)
    assert learner.version == 1


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_sampler_and_learner_agree_to_the_bit(recipe):
    """Deterministic mode: ratio one for every token, packed with others, with and without the recorded experts."""
    model = wide_model(recipe)
    groups = groups_of(sampled(model), REWARDS)
    for replay in (False, True):
        learner, _ = learner_of(copy.deepcopy(model), replay=replay)
        report = learner.step(groups)
        assert report.mismatch == 0
        assert report.largest_log_ratio == 0


def test_replay_closes_the_gap_that_batching_makes():
    """Without deterministic mode and in FP32, replayed experts leave rounding only."""
    model = wide_model("fp32", deterministic=False)
    learner, _ = learner_of(copy.deepcopy(model), replay=True)
    report = learner.step(groups_of(sampled(model), REWARDS))
    assert report.largest_log_ratio < 1e-4
    assert report.mismatch < 1e-6


def test_replayed_experts_are_used():
    """Records of other experts change the log-probabilities; a threshold that none of them meets brings the router's own back."""
    model = wide_model()
    answers = sampled(model)
    for answer in answers:
        answer.experts = np.where(answer.experts < 0, answer.experts, (answer.experts + 1) % 4).astype(np.int16)
    ratios = []
    for options in ({"replay": True}, {"replay": True, "replay_threshold": 1e9}, {"replay": False}):
        learner, _ = learner_of(copy.deepcopy(model), **options)
        ratios.append(learner.step(groups_of(answers, REWARDS)).largest_log_ratio)
    assert ratios[0] > 1e-3
    assert ratios[1] == ratios[2] == 0


def test_equal_rewards_move_nothing():
    model = wide_model()
    before = copy.deepcopy(model.state_dict())
    learner, _ = learner_of(model)
    report = learner.step(groups_of(sampled(model), [0.3] * 4 + [None] * 3 + [1.0]))
    assert report.skipped
    assert (report.loss, report.gradient_norm) == (0.0, 0.0)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert learner.version == 1


def test_a_step_raises_what_was_rewarded():
    model = wide_model()
    answers = sampled(model)
    groups = groups_of(answers, REWARDS)

    def log_prob(m, answer):
        ids = torch.tensor([*answer.request.prompt, *answer.ids])
        with torch.no_grad():
            logits, _ = m(ids[None])
        start = len(answer.request.prompt)
        return float(token_log_probs(logits[0, start - 1 : -1], ids[start:], 0.9).sum())

    before = [log_prob(model, a) for a in answers]
    learner, _ = learner_of(model, lr=1e-3)
    learner.step(groups)
    after = [log_prob(model, a) for a in answers]
    gain = [(b - a) * (r - 2 / 4) for a, b, r in zip(before[:4], after[:4], REWARDS[:4], strict=True)]
    assert sum(gain) > 0


def test_samples_that_are_not_finite_are_dropped_and_counted():
    model = wide_model()
    answers = sampled(model)
    answers[0].log_probs[1] = math.nan
    learner, optimizer = learner_of(model)
    report = learner.step(groups_of(answers, REWARDS))
    assert report.nonfinite == 1
    assert all(g is None or bool(g.isfinite().all()) for g in optimizer.seen)


def test_staleness_is_of_the_oldest_token():
    model = wide_model()
    answers = sampled(model)
    answers[2].versions[0] = 3
    for answer in answers:
        answer.versions = [max(v, 3) if i == 0 and answer is answers[2] else 5 for i, v in enumerate(answer.versions)]
    learner, _ = learner_of(model, version=7)
    assert learner.step(groups_of(answers, REWARDS)).staleness == 4


def test_an_untrained_model_takes_a_step_in_every_recipe():
    for recipe in ("fp32", "bf16", "mxfp8", "nvfp4"):
        model = Model(config_of(recipe, deterministic=False), 0)
        learner, _ = learner_of(model)
        report = learner.step(groups_of(sampled(model), REWARDS))
        assert not report.skipped
        assert math.isfinite(report.gradient_norm)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("micro_tokens", [1, 10_000])
def test_the_kl_from_a_reference_is_taken_off_the_reward(estimator, micro_tokens):
    """The gradient is that of rewards written out: one run at a time through the reference, also of a chain of segments."""
    model, reference = wide_model(), wide_model(seed=1)
    answers = sampled(model)
    chains = [segments_of(answers[:2]), *(segments_of([a]) for a in answers[2:])]
    samples = [TrainSample(chain, r) for chain, r in zip(chains, REWARDS[1:], strict=True)]
    penalties = []
    for sample in samples:
        d = []
        for segment in sample.segments:
            ids = torch.tensor(segment.ids)
            with torch.no_grad():
                there = token_log_probs(reference(ids[None])[0][0, :-1], ids[1:], 0.9)
            d += [lp - float(ref) for lp, ref, m in zip(segment.log_probs[1:], there, segment.mask[1:], strict=True) if m]
        penalties.append(sum(d) if estimator == "k1" else sum(math.exp(-x) - 1 + x for x in d))
    earned = [s.reward if s.reward is None else s.reward - 0.01 * p for s, p in zip(samples, penalties, strict=True)]
    expected = gradient_by_hand(
        copy.deepcopy(model), [[TrainSample(s.segments, r) for s, r in zip(samples, earned, strict=True)]], 0.9
    )
    options = dict(reference=reference, kl_weight=0.01, kl_estimator=estimator)
    learner, optimizer = learner_of(model, correction=Correction("none"), micro_tokens=micro_tokens, **options)
    report = learner.step([samples])
    valid = [p for p, r in zip(penalties, earned, strict=True) if r is not None]
    assert report.kl == pytest.approx(sum(valid) / len(valid), rel=1e-4)
    assert report.mean_reward == pytest.approx(sum(r for r in earned if r is not None) / len(valid), rel=1e-4)
    for (name, _), found in zip(model.named_parameters(), optimizer.seen, strict=True):
        assert torch.allclose(found, expected[name], rtol=1e-3, atol=1e-6 * max(1.0, float(expected[name].abs().max()))), name
    assert all(p.grad is None for p in reference.parameters())


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_the_kl_is_exactly_zero_before_the_first_step(recipe):
    """Deterministic mode: equal rewards stay equal, and nothing moves."""
    model = wide_model(recipe)
    learner, _ = learner_of(model, reference=copy.deepcopy(model), kl_weight=10.0)
    report = learner.step(groups_of(sampled(model), [0.5] * 8))
    assert (report.kl, report.mean_reward, report.skipped) == (0.0, 0.5, True)


def test_a_kl_that_is_not_finite_counts_for_nothing():
    model = wide_model()
    answers = sampled(model)
    answers[0].log_probs[1] = math.nan
    answers[1].log_probs[0] = -math.inf
    learner, _ = learner_of(model, reference=copy.deepcopy(model), kl_weight=1.0)
    report = learner.step(groups_of(answers, REWARDS))
    assert report.invalid == 3
    assert report.kl == 0


def test_errors():
    with pytest.raises(ValueError, match="kl_weight needs a reference"):
        learner_of(wide_model(), kl_weight=0.1)
    with pytest.raises(ValueError, match="kl_estimator must be one of"):
        learner_of(wide_model(), kl_estimator="k2")
    with pytest.raises(ValueError, match="micro_tokens must be at least 1"):
        learner_of(wide_model(), micro_tokens=0)
