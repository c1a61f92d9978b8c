"""route, sort_by_expert, permute, unpermute, swiglu and their backward verbs, beside torch operators."""

import pytest
import torch

from benchmarks import peers
from benchmarks.cases import CASES
from benchmarks.conftest import Provider
from mxmoe import ops, permute, quantize, route, swiglu, unpermute

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def routing_of(case):
    return route(torch.randn(case.tokens, case.num_experts), case.top_k)


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
    ids = routing_of(case).ids
    flat = ids.flatten()
    providers = {
        "host": lambda: ops.sort_by_expert(ids, case.num_experts),
        "torch sort": lambda: (flat.sort(stable=True), flat.bincount(minlength=case.num_experts)),
    }
    compare("sort_by_expert", f"{case.name}: T {case.tokens} K {case.top_k}", providers, bytes=3 * ids.nbytes)


@cases
def test_permute(compare, case):
    routing, x = routing_of(case), torch.randn(case.tokens, case.dim).bfloat16()
    out = torch.empty(case.rows, case.dim, dtype=x.dtype)
    tokens = routing.permutation.long() // case.top_k
    providers = {
        "host": Provider(lambda: permute(x, routing, out=out), True),
        "torch index_select": Provider(lambda: torch.index_select(x, 0, tokens, out=out), True),
        "torch indexing": lambda: x[tokens],
    }
    compare("permute", f"{case.name}: [{case.rows}, {case.dim}]", providers, bytes=2 * out.nbytes)


@cases
def test_unpermute(compare, case):
    """The weighted sum over a token's experts."""
    routing, y = routing_of(case), torch.randn(case.rows, case.dim).bfloat16()
    out = torch.empty(case.tokens, case.dim, dtype=y.dtype)
    providers = {
        "host": Provider(lambda: unpermute(y, routing, routing.weights, out=out), True),
        "torch index, bmm": lambda: peers.weighted_sum(y, routing.inverse, routing.weights),
    }
    compare("unpermute", f"{case.name}: [{case.rows}, {case.dim}]", providers, bytes=y.nbytes + out.nbytes)


@cases
def test_unpermute_backward(compare, case):
    routing, y, dy = routing_of(case), torch.randn(case.rows, case.dim).bfloat16(), torch.randn(case.tokens, case.dim).bfloat16()
    slots = routing.permutation.long()
    flat = routing.weights.flatten()[slots, None].bfloat16()

    def in_torch():
        gathered = dy[slots // case.top_k]
        return gathered * flat, (gathered * y).sum(1, dtype=torch.float32)

    providers = {"host": lambda: ops.unpermute_backward(dy, routing, routing.weights, y), "torch": in_torch}
    compare("unpermute_backward", f"{case.name}: [{case.rows}, {case.dim}]", providers, bytes=3 * y.nbytes)


@cases
def test_swiglu(compare, case):
    h = torch.randn(case.rows, 2 * case.expert_dim).bfloat16()
    out = torch.empty(case.rows, case.expert_dim, dtype=h.dtype)
    quantized = quantize(out, "mxfp8")
    providers = {
        "host": Provider(lambda: swiglu(h, out=out), True),
        "host, to mxfp8": Provider(lambda: swiglu(h, format="mxfp8", out=quantized), True, h.nbytes + quantized.nbytes),
        "torch": lambda: peers.swiglu(h),
    }
    compare("swiglu", f"{case.name}: [{case.rows}, {2 * case.expert_dim}]", providers, bytes=h.nbytes + out.nbytes)


@cases
def test_swiglu_backward(compare, case):
    h, da = torch.randn(case.rows, 2 * case.expert_dim).bfloat16(), torch.randn(case.rows, case.expert_dim).bfloat16()
    out = torch.empty_like(h)
    leaf = h.clone().requires_grad_()
    a = peers.swiglu(leaf)
    providers = {
        "host": Provider(lambda: ops.swiglu_backward(da, h, out=out), True),
        "torch autograd": lambda: torch.autograd.grad(a, leaf, da, retain_graph=True),
    }
    compare("swiglu_backward", f"{case.name}: [{case.rows}, {2 * case.expert_dim}]", providers, bytes=2 * h.nbytes + da.nbytes)
