"""Advantages, corrections and the loss against closed forms; what is masked or not finite has no part in it."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.objective import (
    Correction,
    distillation_loss,
    fresh_tokens,
    group_advantages,
    kl_penalty,
    pack_by_cost,
    policy_loss,
    token_log_probs,
)

F64 = torch.float64


def advantages(rewards, **options):
    found, counts = group_advantages(rewards, **options)
    return [round(a, 5) if c else None for a, c in zip(found.tolist(), counts.tolist(), strict=True)]


def test_a01_equal_rewards_have_no_advantage():
    for options in ({}, {"standardize": True}, {"baseline": "leave_one_out", "standardize": True}):
        assert advantages([0.35] * 8, **options) == [0.0] * 8
    found = advantages([0.35] * 7 + [0.95], baseline="leave_one_out", standardize=True)
    assert found[-1] == 0.6
    assert max(map(abs, found)) < 1


def test_a03_a_missing_reward_has_no_part():
    third = round(1 / 3, 5)
    assert advantages([1, 0, None, 1]) == [third, -2 * third - 1e-5, None, third]
    assert advantages([1, 0, float("nan"), 1], standardize=True) == [0.57735, -1.1547, None, 0.57735]
    assert advantages([None, 1.0]) == [None, 0.0]
    assert advantages([None, None]) == [None, None]


@given(st.lists(st.one_of(st.none(), st.floats(-5, 5)), min_size=1, max_size=12))
def test_advantages_sum_to_zero(rewards):
    found, counts = group_advantages(rewards)
    assert abs(found.sum()) < 1e-9
    assert counts.tolist() == [reward is not None for reward in rewards]
    assert not found[~counts].any()


def test_a13_the_temperature_is_in_the_log_probs():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    found = [token_log_probs(logits, torch.tensor([0]), t).item() for t in (1.0, 0.5, 0.6)]
    assert found == pytest.approx([-0.407606, -0.142932, -0.202573], abs=1e-6)
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_log_probs(logits, torch.tensor([0]), 0.0)


def random_tokens(n, seed, samples=4):
    g = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(n, generator=g, dtype=F64) * 3
    log_probs = behaviour + torch.randn(n, generator=g, dtype=F64) * 0.7
    owner = torch.randint(0, samples, (n,), generator=g).sort().values
    advantage = torch.randn(samples, generator=g, dtype=F64)[owner]
    return log_probs, behaviour, advantage, torch.rand(n, generator=g) < 0.7, owner


def weight_by_hand(correction, log_probs, behaviour, mask, owner, i):
    ratio = math.exp(log_probs[i] - behaviour[i])
    if correction.name == "none":
        return 1.0
    if correction.name == "token_clip":
        return min(ratio, correction.high)
    judged = ratio
    if correction.name == "sequence_mask":
        own = [j for j in range(len(mask)) if owner[j] == owner[i] and mask[j]]
        judged = math.exp(sum(float(log_probs[j] - behaviour[j]) for j in own) / len(own))
    return ratio if correction.low <= judged <= correction.high else 0.0


@pytest.mark.parametrize("name", ["none", "token_clip", "token_mask", "sequence_mask"])
def test_loss_and_gradient_by_hand(name):
    correction = Correction(name, 0.8, 1.3)
    log_probs, behaviour, advantage, mask, owner = random_tokens(40, 1)
    leaf = log_probs.clone().requires_grad_()
    loss, report = policy_loss(leaf, behaviour, advantage, mask, owner, 50, correction)
    loss.backward()
    weights = [weight_by_hand(correction, log_probs, behaviour, mask, owner, i) if mask[i] else 0.0 for i in range(40)]
    expected = [-w * float(a) / 50 for w, a in zip(weights, advantage, strict=True)]
    assert leaf.grad.tolist() == pytest.approx(expected, abs=1e-12)
    assert loss.item() == pytest.approx(sum(e * float(lp) for e, lp in zip(expected, log_probs, strict=True)), abs=1e-12)
    assert report.tokens == int(mask.sum())
    assert report.dropped == sum(w == 0 for w, m in zip(weights, mask, strict=True) if m)


@settings(max_examples=40)
@given(
    st.integers(0, 2**31),
    st.lists(st.integers(1, 39), max_size=5),
    st.sampled_from(["none", "token_clip", "token_mask", "sequence_mask"]),
)
def test_micro_batches_add_up_however_samples_are_packed(seed, cuts, name):
    """Samples in any order, in any number of calls."""
    tokens = random_tokens(40, seed, samples=8)
    total = int(tokens[3].sum())
    whole = tokens[0].clone().requires_grad_()
    loss, _ = policy_loss(whole, *tokens[1:], total, Correction(name))
    loss.backward()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()
    bounds = sorted({0, 8, *(cut % 9 for cut in cuts)})
    parts = tokens[0].clone().requires_grad_()
    summed = 0.0
    for low, high in pairwise(bounds):
        index = torch.cat([(tokens[4] == s).nonzero().flatten() for s in order[low:high]])
        renamed = torch.tensor([order[low:high].index(s) for s in tokens[4][index].tolist()], dtype=torch.int64)
        part, _ = policy_loss(parts[index], *(t[index] for t in tokens[1:4]), renamed, total, Correction(name))
        part.backward()
        summed += part.item()
    assert summed == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(parts.grad, whole.grad, atol=1e-14)


def test_equal_groups_have_exactly_no_gradient():
    log_probs, behaviour, _, mask, owner = random_tokens(40, 3)
    found, _ = group_advantages([0.1 + 0.2] * 4)
    leaf = log_probs.requires_grad_()
    policy_loss(leaf, behaviour, found[owner], mask, owner, 40)[0].backward()
    assert not leaf.grad.any()


def test_a15_a_huge_ratio_is_limited_and_reported():
    for correction in (Correction(name) for name in ("none", "token_clip", "token_mask", "sequence_mask")):
        leaf = torch.tensor([-0.1, -0.1], requires_grad=True)
        mask, owner = torch.tensor([True, False]), torch.zeros(2, dtype=torch.int64)
        for advantage in (0.0, 1.0):
            leaf.grad = None
            loss, report = policy_loss(
                leaf, torch.tensor([-200.1, -200.1]), torch.full((2,), advantage), mask, owner, 1, correction
            )
            loss.backward()
            assert loss.isfinite()
            assert leaf.grad.isfinite().all()
            assert leaf.grad[1] == 0
            assert advantage or not leaf.grad.any()
            assert report.largest_log_ratio == pytest.approx(200.0)


def test_a17_an_empty_step():
    leaf = torch.randn(6, requires_grad=True)
    zeros = torch.zeros(6)
    loss, report = policy_loss(leaf, zeros, zeros + 1, torch.zeros(6, dtype=torch.bool), torch.zeros(6, dtype=torch.int64), 0)
    loss.backward()
    assert loss.item() == 0
    assert not leaf.grad.any()
    assert (report.tokens, report.mismatch, report.largest_log_ratio) == (0, 0, 0)
    empty = torch.zeros(0)
    assert policy_loss(empty, empty, empty, empty.bool(), empty.long(), 0)[0] == 0


def test_a19_stale_tokens():
    versions = torch.tensor([5, 5, 7, 8, 8])
    assert fresh_tokens(versions, 9, 2).tolist() == [False, False, True, True, True]
    with pytest.raises(ValueError, match=r"later than current \(7\), got 8"):
        fresh_tokens(versions, 7, 2)


@pytest.mark.parametrize("filler", [1.0, 0.0, math.nan, math.inf])
def test_a21_fillers_of_masked_tokens_are_never_read(filler):
    mask = torch.tensor([True, False, True])
    results = []
    for value in (filler, -0.5):
        leaf = torch.tensor([-0.3, value, -0.7], requires_grad=True)
        behaviour, advantage = torch.tensor([-0.4, value, -0.6]), torch.tensor([1.0, value, -1.0])
        loss, report = policy_loss(leaf, behaviour, advantage, mask, torch.zeros(3, dtype=torch.int64), 2)
        loss.backward()
        results.append((loss.item(), leaf.grad.tolist(), report))
    assert results[0] == results[1]


def test_tokens_that_are_not_finite_are_dropped_and_counted():
    leaf = torch.tensor([-0.3, math.nan, -math.inf, -0.2], requires_grad=True)
    behaviour = torch.tensor([-0.3, -0.3, -0.3, math.nan])
    loss, report = policy_loss(
        leaf, behaviour, torch.ones(4), torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), 4
    )
    loss.backward()
    assert leaf.grad.tolist() == [-0.25, 0, 0, 0]
    assert (report.tokens, report.nonfinite) == (1, 3)


def test_kl_of_own_tokens():
    mask = torch.tensor([True, False, True])
    assert kl_penalty(torch.tensor([-1.0, math.nan, -2.0]), torch.tensor([-1.5, 0.0, -1.75]), mask) == pytest.approx(0.25)


def test_estimates_of_the_kl_agree_with_its_definition():
    """Means over many draws from p against the sum over the vocabulary; k3 is never negative."""
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(6, generator=g, dtype=F64).log_softmax(0) for _ in range(2))
    exact = float((p.exp() * (p - q)).sum())
    draws = torch.multinomial(p.exp(), 200_000, replacement=True, generator=g)
    for estimator in ("k1", "k3"):
        each = [kl_penalty(p[i : i + 1], q[i : i + 1], torch.ones(1, dtype=torch.bool), estimator) for i in range(6)]
        every = torch.tensor(each, dtype=F64)[draws]
        assert abs(float(every.mean()) - exact) < 4 * float(every.std()) / len(draws) ** 0.5
        assert estimator == "k1" or min(each) >= 0
    far = kl_penalty(torch.tensor([-200.0]), torch.tensor([-0.1]), torch.ones(1, dtype=torch.bool), "k3")
    assert far == pytest.approx(math.expm1(20) - 20)
    with pytest.raises(ValueError, match="estimator must be one of"):
        kl_penalty(p, q, torch.ones(6, dtype=torch.bool), "k2")


@given(st.integers(0, 2**31), st.floats(0.3, 2.0), st.integers(1, 5))
def test_distillation_by_hand(seed, temperature, count):
    g = torch.Generator().manual_seed(seed)
    z, other = (3 * torch.randn(count, 7, generator=g) for _ in range(2))
    leaf = z.clone().requires_grad_()
    loss = distillation_loss(leaf, other, count + 2, temperature)
    loss.backward()
    p, q = ((x.double() / temperature).softmax(1) for x in (z, other))
    d = p.log() - q.log()
    kl = (p * d).sum(1, keepdim=True)
    assert loss.item() == pytest.approx(float(kl.sum()) / (count + 2), rel=1e-4, abs=1e-6)
    assert torch.allclose(leaf.grad.double(), p * (d - kl) / temperature / (count + 2), atol=1e-5)
    assert distillation_loss(z, z, count) == 0
    with pytest.raises(ValueError, match="num_tokens must count"):
        distillation_loss(z, z, count - 1)


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(1, 8), st.sampled_from([0.0, 1e-3]))
def test_bins_hold_every_sample_once_and_are_even(lengths, bins, quadratic):
    packed = pack_by_cost(lengths, bins, quadratic)
    assert sorted(i for each in packed for i in each) == list(range(len(lengths)))
    costs = [sum(lengths[i] + quadratic * lengths[i] ** 2 for i in each) for each in packed]
    dearest = max((n + quadratic * n * n for n in lengths), default=0)
    assert max(costs) <= sum(costs) / bins + dearest + 1e-6  # of every such greedy schedule (Graham 1969)


def test_errors_name_argument_expected_and_got():
    log_probs, behaviour, advantage, mask, owner = random_tokens(8, 0)
    with pytest.raises(ValueError, match=r"behaviour must have shape \(8,\), got \(7,\)"):
        policy_loss(log_probs, behaviour[:7], advantage, mask, owner, 8)
    with pytest.raises(TypeError, match="mask must be bool"):
        policy_loss(log_probs, behaviour, advantage, mask.float(), owner, 8)
    with pytest.raises(ValueError, match="num_tokens must count all trained tokens"):
        policy_loss(log_probs, behaviour, advantage, mask, owner, 0)
    with pytest.raises(ValueError, match="name must be one of"):
        Correction("clip")
    with pytest.raises(ValueError, match="must enclose 1"):
        Correction("token_mask", 1.5, 2.0)
    with pytest.raises(ValueError, match="rewards must be finite"):
        group_advantages([1.0, math.inf])
    with pytest.raises(ValueError, match="baseline must be one of"):
        group_advantages([1.0], "median")
    with pytest.raises(ValueError, match="at least one sample"):
        group_advantages([])
    with pytest.raises(ValueError, match="num_bins must be at least 1"):
        pack_by_cost([1], 0)
