"""route and its backward, sort_by_expert: bytes read and written per second, beside torch operators."""

import pytest
import torch

from benchmarks.cases import CASES
from mxmoe import ops, route

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@cases
def test_route(compare, case):
    """Logits to ids, weights and the rows' order; torch: softmax, top-k, sort."""
    logits = torch.randn(case.tokens, case.num_experts)

    def torch_route():
        weights, ids = logits.softmax(-1).topk(case.top_k)
        return weights / weights.sum(-1, keepdim=True), ids.flatten().sort(stable=True), ids.flatten().bincount()

    providers = {
        "host softmax": lambda: route(logits, case.top_k),
        "host sigmoid, 4 groups": lambda: route(logits, case.top_k, score="sigmoid", num_groups=4, groups_kept=2),
        "torch softmax": torch_route,
    }
    shape = f"{case.name}: T {case.tokens} E {case.num_experts} K {case.top_k}"
    compare("route", shape, providers, bytes=logits.nbytes + 8 * case.rows)


@cases
def test_route_backward(compare, case):
    logits = torch.randn(case.tokens, case.num_experts)
    routing, grad = route(logits, case.top_k), torch.randn(case.tokens, case.top_k)
    leaf = logits.clone().requires_grad_()
    weights = leaf.softmax(-1).gather(1, routing.ids.long())
    weights = weights / weights.sum(-1, keepdim=True)
    providers = {
        "host": lambda: ops.route_backward(logits, routing, grad),
        "torch autograd": lambda: torch.autograd.grad(weights, leaf, grad, retain_graph=True),
    }
    compare("route_backward", f"{case.name}: T {case.tokens} E {case.num_experts}", providers, bytes=2 * logits.nbytes)


@cases
def test_sort_by_expert(compare, case):
    ids = route(torch.randn(case.tokens, case.num_experts), case.top_k).ids
    flat = ids.flatten()
    providers = {
        "host": lambda: ops.sort_by_expert(ids, case.num_experts),
        "torch sort": lambda: (flat.sort(stable=True), flat.bincount(minlength=case.num_experts)),
    }
    compare("sort_by_expert", f"{case.name}: T {case.tokens} K {case.top_k}", providers, bytes=3 * ids.nbytes)
