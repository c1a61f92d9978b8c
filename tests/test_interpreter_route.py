"""The router's GPU kernels under the interpreter: the reference's bytes."""

import pytest
import torch

from mxmoe import ops
from tests.interpreter_cases import assert_same, check_route


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(0, 8, 2), (1, 1, 1), (300, 40, 5), (20, 1000, 17), (13, 384, 8)], ids=str
)
def test_route_is_the_references(tokens, experts, top_k, score):
    check_route(tokens, experts, top_k, score, scale=2.5)
    check_route(tokens, experts, top_k, score, biased=True, normalize=False)
    check_route(tokens, experts, top_k, score, replayed=True, replay_threshold=0.5)
    if experts % 8 == 0:
        check_route(tokens, experts, top_k, score, biased=True, num_groups=8, groups_kept=4)
        check_route(tokens, experts, top_k, score, replayed=True, replay_threshold=1.0, num_groups=8, groups_kept=7)


def test_a_routing_is_the_references():
    logits = torch.randn(200, 40)
    got, want = (ops.route(logits, 3, backend=name) for name in ("interpreter", "reference"))
    assert_same(*((r.ids, r.weights, r.counts, r.offs, r.permutation, r.inverse, r.probs_mean, r.z) for r in (got, want)))


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 3), (5, 0, 3), (1, 1, 1), (2000, 3, 4999), (600, 2, 4)], ids=str)
def test_sort_by_expert_is_the_references(tokens, top_k, experts):
    ids = torch.randint(-2, experts + 2, (tokens, top_k), dtype=torch.int32)
    for some in (ids, ids.clamp(0, 0), torch.full_like(ids, 2**31 - 1)):  # ragged, all on one expert, none
        got, want = (ops.sort_by_expert(some, experts, backend=name) for name in ("interpreter", "reference"))
        assert_same(got, want)
