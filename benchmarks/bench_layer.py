"""moe_layer, forward alone and forward with backward, beside transformers' Qwen3-MoE block; weights are quantized on every call, as
after an optimizer step, except where prepared."""

import pytest
import torch

from benchmarks import peers
from benchmarks.cases import CASES, TINY
from mxmoe import moe_layer, prepare_experts

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
RECIPES = ("bf16", "mxfp8", "nvfp4")


def set_up(case):
    """(x, dy, blocks, leaf weights); eager transformers only where its backward takes less than seconds."""
    x, dy = (torch.randn(case.tokens, case.dim).bfloat16() for _ in range(2))
    blocks = peers.qwen3_blocks(case)
    if case is not TINY:
        blocks = {"grouped_mm": blocks["grouped_mm"]}
    block = blocks["grouped_mm"]
    weights = [
        w.detach().clone().requires_grad_() for w in (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    ]
    return x, dy, blocks, weights


def flops(case) -> float:
    """Of the forward's products."""
    return 2.0 * case.rows * case.dim * 3 * case.expert_dim


@cases
def test_forward(compare, case):
    x, _, blocks, weights = set_up(case)
    prepared = prepare_experts(*weights[1:], "mxfp8", backward=False)

    @torch.no_grad()
    def ours(recipe, prepared=None):
        return moe_layer(x, *weights, top_k=case.top_k, recipe=recipe, prepared=prepared)

    providers = {f"host {recipe}": lambda r=recipe: ours(r) for recipe in RECIPES}
    providers["host mxfp8, prepared"] = lambda: ours("mxfp8", prepared)
    providers |= {f"transformers {name}": lambda b=block: torch.no_grad()(b)(x[None]) for name, block in blocks.items()}
    compare("moe_layer forward", case.shape, providers, flops=flops(case))


@cases
def test_forward_backward(compare, case):
    x, dy, blocks, weights = set_up(case)

    def ours(recipe):
        leaf = x.clone().requires_grad_()
        moe_layer(leaf, *weights, top_k=case.top_k, recipe=recipe)[0].backward(dy)
        for w in weights:
            w.grad = None

    providers = {f"host {recipe}": lambda r=recipe: ours(r) for recipe in RECIPES}
    providers |= {f"transformers {name}": lambda b=block: peers.forward_backward(b, x, dy) for name, block in blocks.items()}
    compare("moe_layer forward and backward", case.shape, providers, flops=3 * flops(case))
