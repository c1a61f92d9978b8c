"""permute, unpermute, swiglu and their backward verbs, beside torch operators."""

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
