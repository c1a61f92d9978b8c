"""The layer: its errors beside the floor of tests/floor.py, and that a token's bytes do not depend on the other tokens."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.bars.harness import Bar, Run
from mxmoe import moe_layer
from mxmoe.recipes import RECIPES
from tests.floor import MARGIN, random_case, worst_ratio

CASES = 25  # seeds of random shapes and routings, each as moe_layer and as moe_experts
TOKENS = {"fp32": 64, "bf16": 512, "mxfp8": 64, "nvfp4": 64}  # pooled per case; torch in BF16 has the noisier gradients
BATCHES = 20  # of each size, per recipe


def error_over_floor(recipe: str, run: Run) -> float:
    """Largest error / floor of y and of every gradient over all cases."""
    cases = [(seed, experts_only) for seed in range(run.count(CASES, least=3)) for experts_only in (False, True)]
    ratios = []
    for seed, experts_only in run.steps(cases):
        dtype = torch.float32 if recipe == "fp32" else None  # BF16 arguments would round its results
        case, options = random_case(seed, dtype=dtype, experts_only=experts_only)
        ratios.append(worst_ratio(case, options, recipe, tokens=TOKENS[recipe]))
    return max(ratios)[0]


def variant_tokens(recipe: str, run: Run) -> float:
    """Tokens whose bytes change when they are computed alone, in another order, or in another batch."""
    changed = 0
    for seed in run.steps(range(run.count(BATCHES, least=2))):
        g = torch.Generator().manual_seed(seed)
        tokens, width, hidden, experts = 61 + seed, (64, 96, 200)[seed % 3], (32, 40, 72)[seed % 3], 8
        x, router, w13, w2, shared_w13, shared_w2 = (
            torch.randn(*shape, generator=g).to((torch.float32, torch.bfloat16)[seed % 2])
            for shape in ((tokens, width), (experts, width), (experts, 2 * hidden, width), (experts, width, hidden),
                          (2 * hidden, width), (width, hidden))
        )  # fmt: skip

        def y(rows: Tensor, router=router, w13=w13, w2=w2, shared=(shared_w13, shared_w2)) -> Tensor:
            return moe_layer(rows, router, w13, w2, top_k=2, recipe=recipe, score="sigmoid", shared=shared)[0]

        whole = y(x)
        orders = [torch.randperm(tokens, generator=g), *(torch.randperm(tokens, generator=g)[:n] for n in (2, 5, 17, 33))]
        orders += [torch.tensor([t]) for t in range(tokens)]
        orders.append(torch.arange(tokens).repeat(3))
        changed += sum(int((y(x[order]) != whole[order]).any(1).sum()) for order in orders)
    return changed


BARS = [
    *(Bar(f"layer {r}: error / floor", "<=", MARGIN, "x", partial(error_over_floor, r)) for r in RECIPES),
    *(Bar(f"batch invariance {r}", "<=", 0, "changed tokens", partial(variant_tokens, r)) for r in RECIPES),
]
