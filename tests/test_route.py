"""route, sort_by_expert, route_backward: each backend against torch, transformers' routers, FP64 autograd and the reference."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import mxmoe
from mxmoe.backends.reference import arithmetic
from tests.helpers import Backend, assert_same_bits, backend_fixture, backends_for, flushed_subnormals, num_threads, poisoned

NAN, INF = float("nan"), float("inf")
REFERENCE = Backend("reference")
backend = backend_fixture("route")


def route(backend, logits, top_k, score="softmax", *, bias=None, replay=None, num_groups=1, groups_kept=1, normalize=True,
          scale=1.0, replay_threshold=None):  # fmt: skip
    """(ids, weights, probs, z) of one backend."""
    tokens, experts = logits.shape
    out = poisoned((tokens, top_k), torch.int32), *(poisoned(s, torch.float32) for s in ((tokens, top_k), (experts,), (1,)))
    backend.run("route", logits, bias, replay, top_k, score, num_groups, groups_kept, normalize, scale, replay_threshold, *out)
    return out


def route_backward(backend, logits, ids, weights_grad, probs_grad, z_grad, score, normalize=True, scale=1.0):
    out = poisoned(logits.shape, torch.float32)
    backend.run("route_backward", logits, ids, weights_grad, probs_grad, z_grad, score, normalize, scale, out)
    return out


def sort_by_expert(backend, ids, num_experts):
    """(counts, offs, permutation, inverse) of one backend."""
    shapes = (num_experts,), (num_experts,), (ids.numel(),), tuple(ids.shape)
    out = [poisoned(shape, torch.int32) for shape in shapes]
    backend.run("sort_by_expert", ids, num_experts, *out)
    return out


def ints(rows):
    return torch.tensor(rows, dtype=torch.int32)


def special_logits(tokens, experts, seed=0):
    """Logits of several sizes with rows of ties, of -Inf, of NaN, of +Inf and of numbers that underflow or overflow."""
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [
        lambda r: r.zero_(),
        lambda r: r.fill_(-120.0),
        lambda r: r.fill_(-INF),
        lambda r: r[1:].fill_(-INF),
        lambda r: r[0].fill_(NAN),
        lambda r: r.fill_(NAN),
        lambda r: r[-1].fill_(INF),
        lambda r: r.mul_(1e30),
        lambda r: r.mul_(30.0),
        lambda r: r.mul_(1e-42),
        lambda r: r.round_(),
        lambda r: r.copy_(torch.where(r > 0, r, -0.0)),
    ]
    for row, change in zip(logits, rows, strict=False):
        change(row)
    return logits


# The router by hand


def test_r01_underflowing_scores_give_zero_weights_and_finite_gradients(backend):
    logits = torch.tensor([[-120.0] * 8, [-90.0] * 8])
    ids, weights, probs, _ = route(backend, logits, 2, "sigmoid", bias=torch.zeros(8))
    assert ids.tolist() == [[0, 1], [0, 1]]
    assert torch.equal(weights, torch.zeros(2, 2))
    assert torch.equal(probs, torch.zeros(8))
    for score in ("softmax", "sigmoid"):
        grad = route_backward(backend, logits, ids, torch.full((2, 2), 1e30), torch.ones(8), torch.ones(1), score)
        assert grad.isfinite().all()


def test_r03_group_score_is_the_sum_of_its_two_best(backend):
    logits = torch.tensor([[0.9, 0.1, 0.1, 0.1, 0.6, 0.6, 0.1, 0.1]]).logit()
    for bias in (None, torch.zeros(8)):
        assert route(backend, logits, 2, "sigmoid", bias=bias, num_groups=2)[0].tolist() == [[4, 5]]


def test_group_with_one_expert_left_counts_that_one(backend):
    logits = torch.tensor([[-INF, -INF, 0.0, NAN, 2.0, -INF, 0.1, 0.1]])
    assert route(backend, logits, 2, num_groups=4, groups_kept=1)[0].tolist() == [[4, 0]]  # then the lowest remaining ids
    assert route(backend, torch.tensor([[1.0, 3.0, 2.0]]), 1, num_groups=3, groups_kept=1)[0].tolist() == [[1]]


def test_r05_nan_logit_poisons_its_token_and_no_other(backend):
    logits = torch.tensor([[NAN, 1.0, 2.0, 0.5], [0.0, 1.0, 2.0, 0.5], [0.0, 1.0, INF, 0.5]])
    for score in ("softmax", "sigmoid"):
        ids, weights, probs, z = route(backend, logits, 2, score)
        assert ids.tolist() == [[2, 1], [2, 1], [1, 3]]
        assert weights[[0, 2]].isnan().all()
        assert torch.equal(weights[1:2], route(backend, logits[1:2], 2, score)[1])
        assert weights[1].isfinite().all()
        assert probs.isnan().all()
        assert z.isnan().all()  # losses over the batch are never silently wrong
        grad = route_backward(backend, logits, ids, torch.ones(3, 2), torch.ones(4), None, score)
        assert grad[[0, 2]].isnan().all()
        assert grad[1].isfinite().all()


def test_nan_bias_poisons_every_token(backend):
    bias = torch.tensor([0.0, NAN, 0.0, 0.0])
    ids, weights, *_ = route(backend, torch.tensor([[0.0, 1.0, 2.0, 3.0]]), 2, "sigmoid", bias=bias)
    assert ids.tolist() == [[3, 2]]
    assert weights.isnan().all()


def test_r07_sigmoid_weights_sum_to_the_scale(backend):
    ids, weights, *_ = route(backend, torch.tensor([[1.0, 0.0, -1.0, 2.0]]), 2, "sigmoid", scale=2.5)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.tensor([[1.366123, 1.133877]]), rtol=1e-6, atol=0)


def test_r11_ties_go_to_the_lower_id(backend):
    logits = torch.zeros(4, 8)
    for score in ("softmax", "sigmoid"):
        assert route(backend, logits, 3, score)[0].tolist() == [[0, 1, 2]] * 4
        assert route(backend, logits, 3, score, num_groups=4, groups_kept=2)[0].tolist() == [[0, 1, 2]] * 4
    assert route(backend, torch.tensor([[-0.0, 0.0] * 20]), 3)[0].tolist() == [[0, 1, 2]]


def test_masked_experts_come_last_lowest_id_first(backend):
    logits = torch.tensor([[-INF, -INF, 1.0, -INF]])
    for bias in (None, torch.tensor([0.0, 9.0, 0.0, 99.0])):
        ids, weights, *_ = route(backend, logits, 3, bias=bias)
        assert ids.tolist() == [[2, 0, 1]]
        assert weights.tolist() == [[1.0, 0.0, 0.0]]
    assert route(backend, torch.full((1, 4), -INF), 2)[1].isnan().all()  # 0 / 0, as in torch.softmax
    assert route(backend, torch.full((1, 4), -INF), 2, "sigmoid")[1].tolist() == [[0.0, 0.0]]


def test_bias_moves_the_selection_and_not_the_weights(backend):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    ids, weights, *_ = route(backend, logits, 1, "sigmoid", bias=torch.tensor([0.0, 0.0, 0.0, 1.0]), normalize=False)
    assert ids.tolist() == [[3]]
    torch.testing.assert_close(weights, torch.tensor([[-1.0]]).sigmoid())


def test_replay_overrides_the_selection_with_current_weights(backend):
    logits = torch.randn(5, 8)
    replay = ints([[7, 0], [-1, 3], [4, 4], [8, 2], [1, -5]])
    ids, weights, probs, z = route(backend, logits, 2, replay=replay)
    assert torch.equal(ids, replay)
    valid = (replay >= 0) & (replay < 8)
    scores = logits.softmax(-1).gather(1, replay.long().clamp(0, 7)) * valid
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    assert weights[~valid].tolist() == [0.0] * 3
    own = route(backend, logits, 2)
    assert torch.equal(probs, own[2])
    assert torch.equal(z, own[3])


def test_replay_threshold_replaces_implausible_experts_in_rank_order(backend):
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()  # own top-3: 0, 1, 2; the smallest score is 0.2
    cases = [
        ([4, 3, 0], 0.25, [1, 3, 0]),  # 0.04 < 0.05 goes, 0.06 stays; 0 is present, so 1 comes in
        ([4, 3, 0], 0.5, [1, 2, 0]),
        ([4, 4, 4], 0.5, [0, 1, 2]),
        ([4, -1, 3], 0.5, [0, -1, 1]),  # no expert stays no expert
        ([4, 3, 9], 0.0, [4, 3, 9]),
        ([2, 4, 1], 1.0, [2, 0, 1]),  # equal to the smallest is plausible
    ]
    for replay, threshold, expected in cases:
        ids, weights, *_ = route(backend, logits, 3, replay=ints([replay]), replay_threshold=threshold)
        assert ids.tolist() == [expected]
        assert torch.equal(weights, route(backend, logits, 3, replay=ids)[1])
    poisoned_row = torch.tensor([[NAN, 0.0, 0.0, 0.0, -50.0]])
    assert route(backend, poisoned_row, 2, replay=ints([[4, 0]]), replay_threshold=1.0)[0].tolist() == [[4, 0]]


def test_no_token_and_one_expert(backend):
    ids, weights, probs, z = route(backend, torch.empty(0, 5), 2)
    assert ids.shape == weights.shape == (0, 2)
    assert probs.tolist() == [0.0] * 5
    assert z.tolist() == [0.0]
    assert route_backward(backend, torch.empty(0, 5), ids, weights, torch.ones(5), torch.ones(1), "softmax").shape == (0, 5)
    ids, weights, probs, z = route(backend, torch.tensor([[3.0]]), 1)
    assert (ids.tolist(), weights.tolist(), probs.tolist(), z.tolist()) == ([[0]], [[1.0]], [1.0], [9.0])


def test_r23_impossible_selections_are_refused():
    logits = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"4.*5"):
        mxmoe.route(logits, 5)
    with pytest.raises(ValueError, match="num_groups"):
        mxmoe.route(logits, 1, num_groups=3)
    with pytest.raises(ValueError, match="groups_kept"):
        mxmoe.route(logits, 1, num_groups=2, groups_kept=3)


# Against other implementations


def test_scores_and_selection_equal_torch(backend):
    logits = torch.randn(200, 40) * 2
    ids, weights, probs, z = route(backend, logits, 6, normalize=False)
    softmax = logits.softmax(-1)
    assert torch.equal(ids, softmax.topk(6)[1].int())
    torch.testing.assert_close(weights, softmax.topk(6)[0], rtol=2e-6, atol=0)  # measured 4e-7
    torch.testing.assert_close(probs, softmax.mean(0), rtol=2e-6, atol=0)
    torch.testing.assert_close(z, logits.double().logsumexp(-1).square().mean()[None].float(), rtol=2e-6, atol=0)
    sigmoid = logits.sigmoid()
    ids, weights, probs, _ = route(backend, logits, 6, "sigmoid", normalize=False)
    assert torch.equal(ids, sigmoid.topk(6)[1].int())
    torch.testing.assert_close(weights, sigmoid.topk(6)[0], rtol=2e-6, atol=0)
    torch.testing.assert_close(probs, (sigmoid / sigmoid.sum(-1, keepdim=True)).mean(0), rtol=2e-6, atol=0)


def test_equals_deepseek_v3_of_transformers(backend):
    config = DeepseekV3Config(hidden_size=32, n_routed_experts=64, num_experts_per_tok=6, n_group=8, topk_group=3,
                              norm_topk_prob=True, routed_scaling_factor=2.5)  # fmt: skip
    router = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight, std=0.3)
    router.e_score_correction_bias.normal_(std=0.2)
    with torch.no_grad():
        logits, their_weights, their_ids = router(torch.randn(300, 32))
    bias = router.e_score_correction_bias
    ids, weights, *_ = route(backend, logits, 6, "sigmoid", bias=bias, num_groups=8, groups_kept=3, scale=2.5)
    ids, order = ids.sort(-1)  # theirs are not sorted
    their_ids, their_order = their_ids.sort(-1)
    assert torch.equal(ids, their_ids.int())
    torch.testing.assert_close(weights.gather(1, order), their_weights.gather(1, their_order), rtol=2e-6, atol=0)


@pytest.mark.parametrize("normalize", [True, False])
def test_equals_qwen3_moe_of_transformers(backend, normalize):
    config = Qwen3MoeConfig(hidden_size=32, num_experts=128, num_experts_per_tok=8, norm_topk_prob=normalize)
    router = Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight, std=0.3)
    with torch.no_grad():
        logits, their_weights, their_ids = router(torch.randn(300, 32))
    ids, weights, *_ = route(backend, logits, 8, normalize=normalize)
    assert torch.equal(ids, their_ids.int())
    torch.testing.assert_close(weights, their_weights, rtol=2e-6, atol=0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradient_equals_autograd_in_float64(backend, score, normalize):
    logits = torch.randn(50, 33)
    ids = route(backend, logits, 4, score)[0]
    ids[7, 1], ids[8] = -1, ints([3, 3, 33, 5])
    grads = torch.randn(50, 4), torch.randn(33), torch.randn(1)
    x = logits.double().requires_grad_()
    scores = x.softmax(-1) if score == "softmax" else x.sigmoid()
    weights = scores.gather(1, ids.long().clamp(0, 32)) * ((ids >= 0) & (ids < 33))
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    terms = weights * 2.5, (scores / scores.sum(-1, keepdim=True)).mean(0), x.logsumexp(-1).square().mean()
    for wanted in ((0, 1, 2), (0,), (1,), (2,)):
        x.grad = None
        sum((terms[i] * grads[i]).sum() for i in wanted).backward(retain_graph=True)
        given = [g if i in wanted else None for i, g in enumerate(grads)]
        got = route_backward(backend, logits, ids, *given, score, normalize, 2.5)
        torch.testing.assert_close(got.double(), x.grad, rtol=1e-5, atol=2e-6)  # measured 1e-6


def test_r13_losses_reach_the_logits():
    logits = torch.randn(64, 4, requires_grad=True)

    def grad_of(coefficient, logits):
        routing = mxmoe.route(logits, 2)
        return torch.autograd.grad(coefficient * (routing.load_balance_loss() + routing.z_loss()), logits)[0]

    one, two = grad_of(0.01, logits), grad_of(0.02, logits)
    assert one.abs().sum() > 0
    torch.testing.assert_close(two, 2 * one)
    twice = torch.cat([logits, logits]).detach().requires_grad_()
    torch.testing.assert_close(grad_of(0.01, twice).sum(0), one.sum(0), rtol=1e-4, atol=1e-8)  # a mean, not a sum


# Bytes

SHAPES = [(0, 8, 2), (1, 1, 1), (300, 40, 5), (257, 256, 8), (20, 1000, 17)]  # the sums run in chunks of 256 tokens


@cache
def reference_cases(shape, score):
    """[(logits, arguments, grads, (ids, weights, probs, z, gradient) of the reference)]"""
    tokens, experts, top_k = shape
    logits, bias = special_logits(tokens, experts), torch.randn(experts) * 0.1
    replay = torch.randint(-1, experts + 1, (tokens, top_k), dtype=torch.int32)
    grads = torch.randn(tokens, top_k), torch.randn(experts), torch.randn(1)
    calls = [
        dict(scale=2.5),
        dict(bias=bias, normalize=False),
        dict(replay=replay, replay_threshold=0.5),
    ]
    if experts % 8 == 0:
        calls += [
            dict(bias=bias, num_groups=8, groups_kept=4),
            dict(num_groups=8, groups_kept=2, replay=replay, replay_threshold=1.0),
        ]
    return [(logits, call, grads, outputs(REFERENCE, logits, top_k, score, call, grads)) for call in calls]


def outputs(backend, logits, top_k, score, call, grads):
    routed = route(backend, logits, top_k, score, **call)
    return *routed, route_backward(backend, logits, routed[0], *grads, score, call.get("normalize", True), 2.5)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", backends_for("route")[1:], ids=str)
def test_bytes_equal_the_reference(backend, shape, score):
    for logits, call, grads, want in reference_cases(shape, score):
        for got, expected in zip(outputs(backend, logits, shape[2], score, call, grads), want, strict=True):
            assert_same_bits(got, expected)


@pytest.mark.parametrize("backend", backends_for("route")[1:], ids=str)
def test_bytes_do_not_depend_on_threads_or_the_callers_flush_mode(backend):
    logits = special_logits(700, 64)
    ids = torch.randint(0, 64, (700, 4), dtype=torch.int32)
    grads = torch.randn(700, 4), torch.randn(64), torch.randn(1)

    def everything():
        return *route(backend, logits, 4), route_backward(backend, logits, ids, *grads, "softmax")

    with num_threads(1):
        want = everything()
    for count in (2, 3):
        with num_threads(count):
            for got, expected in zip(everything(), want, strict=True):
                assert_same_bits(got, expected)
    with flushed_subnormals():
        got = everything()
    for each, expected in zip(got, want, strict=True):
        assert_same_bits(each, expected)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 40), experts=st.sampled_from([4, 12, 33, 64]))
def test_permuting_tokens_permutes_ids_and_weights(seed, tokens, experts):
    logits, order = special_logits(tokens, experts, seed), torch.randperm(tokens)
    for each in backends_for("route"):
        ids, weights, *_ = route(each, logits, 3, "sigmoid")
        permuted_ids, permuted_weights, *_ = route(each, logits[order], 3, "sigmoid")
        assert torch.equal(permuted_ids, ids[order])
        assert_same_bits(permuted_weights, weights[order])


def test_sums_over_tokens_follow_their_definition(backend):
    logits = torch.randn(600, 5)
    ids, weights, *_ = route(backend, logits, 5, normalize=False)  # all experts: the whole softmax
    probs = torch.zeros(600, 5).scatter_(1, ids.long(), weights)
    total = torch.zeros(5)
    for chunk in probs.split(256):
        sums = torch.zeros(5)
        for row in chunk:
            sums = sums + row
        total = total + sums
    assert torch.equal(route(backend, logits, 1)[2], total / 600)


# exp and log of the contract


def test_exp_and_log_are_accurate_and_handle_the_ends():
    x = torch.cat([torch.linspace(-87, 88.7, 200001), torch.tensor([-87.0, 88.7, 0.0, -0.0])])
    exact = x.double().exp()
    assert ((arithmetic.exp(x) - exact) / exact).abs().max() < 1.2e-7  # measured 7.8e-8
    ends = torch.tensor([-INF, -1000.0, -87.00001, 88.70001, INF, NAN])
    assert arithmetic.exp(ends).tolist()[:5] == [0.0, 0.0, 0.0, INF, INF]
    assert arithmetic.exp(ends)[5].isnan()
    y = torch.cat([1 + torch.rand(100000) * 5000, torch.tensor([1.0, 2.0, 2**0.5])])
    torch.testing.assert_close(arithmetic.log(y).double(), y.double().log(), rtol=2e-7, atol=1e-7)
    assert arithmetic.log(torch.tensor([NAN])).isnan().all()
    assert arithmetic.sigmoid(torch.tensor([-90.0, 90.0])).tolist() == [0.0, 1.0]


# sort_by_expert


def test_p01_missing_expert_has_no_row(backend):
    counts, offs, permutation, inverse = sort_by_expert(backend, ints([[0, -1], [1, 2]]), 3)
    assert (counts.tolist(), offs.tolist()) == ([1, 1, 1], [1, 2, 3])
    assert (permutation.tolist(), inverse.tolist()) == ([0, 2, 3, -1], [[0, -1], [1, 2]])


def test_p09_counts_with_an_odd_number_of_experts(backend):
    assert sort_by_expert(backend, ints([[4], [4], [4], [0]]), 5)[0].tolist() == [1, 0, 0, 0, 3]
    assert sort_by_expert(backend, ints([[2], [2], [2]]), 3)[0].tolist() == [0, 0, 3]


def test_p13_same_expert_twice_gives_two_rows(backend):
    counts, _, permutation, inverse = sort_by_expert(backend, ints([[1, 1]]), 2)
    assert (counts.tolist(), permutation.tolist(), inverse.tolist()) == ([0, 2], [0, 1], [[0, 1]])


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 3), (5, 0, 3), (7, 1, 1), (3000, 8, 4999), (9000, 2, 4)])
def test_sort_is_stable_and_its_parts_agree(backend, tokens, top_k, experts):
    ids = torch.randint(-2, experts + 2, (tokens, top_k), dtype=torch.int32)
    counts, offs, permutation, inverse = sort_by_expert(backend, ids, experts)
    flat = ids.flatten().long()
    valid = (flat >= 0) & (flat < experts)
    slots = torch.arange(len(flat))[valid]
    assert torch.equal(counts, torch.bincount(flat[valid], minlength=experts).int())
    assert torch.equal(offs, counts.cumsum(0).int())
    rows = int(counts.sum())
    assert torch.equal(permutation[:rows].long(), slots[flat[valid].argsort(stable=True)])
    assert (permutation[rows:] == -1).all()
    assert (inverse.flatten()[~valid] == -1).all()
    assert torch.equal(inverse.flatten()[permutation[:rows].long()], torch.arange(rows).int())


def test_extreme_ids_mean_no_expert(backend):
    ids = ints([[2**31 - 1, -(2**31)], [3, 2]])
    counts, _, permutation, inverse = sort_by_expert(backend, ids, 3)
    assert (counts.tolist(), permutation.tolist()) == ([0, 0, 1], [3, -1, -1, -1])
    assert inverse.tolist() == [[-1, -1], [-1, 0]]


def test_gradient_equals_finite_differences():
    logits = torch.randn(6, 5)
    routing = mxmoe.route(logits.requires_grad_(), 2, score="sigmoid", scale=2.0)
    direction, upstream = torch.randn(6, 5), torch.randn(6, 2)
    (routing.weights * upstream).sum().backward()
    step = 1e-2
    with torch.no_grad():
        up, down = (mxmoe.route(logits + s * direction, 2, score="sigmoid", scale=2.0, replay=routing.ids) for s in (step, -step))
    slope = ((up.weights - down.weights) * upstream).sum() / (2 * step)
    torch.testing.assert_close(slope, (logits.grad * direction).sum(), rtol=1e-2, atol=1e-3)


def test_load_balance_probabilities_match_one_hot_counts():
    logits = torch.full((8, 4), -30.0).scatter_(1, torch.arange(8)[:, None] % 4, 30.0)
    routing = mxmoe.route(logits, 1)
    torch.testing.assert_close(routing.load_balance_loss(), torch.tensor(1.0))
    one_expert = mxmoe.route(F.one_hot(torch.zeros(8, dtype=torch.long), 4) * 60.0, 1)
    torch.testing.assert_close(one_expert.load_balance_loss(), torch.tensor(4.0))
