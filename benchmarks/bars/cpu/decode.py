"""moe_decode beside the read bandwidth and transformers: D 2048, F 1024, E 64, K 8, one token and eight.

Calls take other experts each time, so that no cache holds them. Bytes are those of the distinct experts' values and scales.
Quantized weights lie in panels, as `quantize_model_` keeps them.
"""

from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from benchmarks import peers, timing
from benchmarks.bars.harness import Bar, Run
from benchmarks.cases import MoECase
from benchmarks.ceilings import read_roof, share
from mxmoe import ops, quantize, to_panels

TARGETS = {"bf16": 0.85, "mxfp8": 0.75, "nvfp4": 0.65}  # one token; eight tokens: 0.8 of that
DISTINCT = 42  # experts that eight tokens with eight each choose among 64, on average
SOURCE_BYTES = 2**29


def case_of(run: Run) -> MoECase:
    return MoECase("decode", 1, 256, 128, 64, 8) if run.quick else MoECase("decode", 1, 2048, 1024, 64, 8)


def choices(case: MoECase, tokens: int) -> list[Tensor]:
    """Expert ids (tokens, K) of eight successive calls, each with the same number of distinct experts."""
    g = torch.Generator().manual_seed(0)
    if tokens == 1:
        return list(torch.randperm(case.num_experts, generator=g).view(-1, 1, case.top_k))
    chosen = []
    while len(chosen) < 8:
        ids = torch.stack([torch.randperm(case.num_experts, generator=g)[: case.top_k] for _ in range(tokens)])
        if len(ids.unique()) == DISTINCT:
            chosen.append(ids)
    return chosen


def ours(case: MoECase, recipe: str, tokens: int, w13: Tensor, w2: Tensor):
    """(call, bytes of weights that it reads)."""
    x, share_of = torch.randn(tokens, case.dim).bfloat16(), torch.rand(tokens, case.top_k)
    weights = [w if recipe == "bf16" else to_panels(quantize(w, recipe)) for w in (w13, w2)]
    ids, out = cycle([i.int() for i in choices(case, tokens)]), torch.empty_like(x)
    distinct = len(choices(case, tokens)[0].unique())

    def call():
        ops.moe_decode(x, next(ids), share_of, *weights, recipe=recipe, activations="bf16", out=out)

    return call, distinct / case.num_experts * sum(w.nbytes for w in weights)


def bandwidth_share(recipe: str, tokens: int, run: Run) -> float:
    case = case_of(run)
    experts = peers.qwen3_blocks(case)["eager"].experts
    call, work = ours(case, recipe, tokens, experts.gate_up_proj.detach(), experts.down_proj.detach())
    source = torch.ones(2**24 if run.quick else SOURCE_BYTES, dtype=torch.uint8)
    return share(call, work, read_roof(min(work, source.nbytes), source), 4 if run.quick else 24)


def over_transformers(tokens: int, run: Run) -> float:
    """Experts alone, without the router, on both sides."""
    case = case_of(run)
    blocks = peers.qwen3_blocks(case)
    experts = next(iter(blocks.values())).experts
    call, _ = ours(case, "bf16", tokens, experts.gate_up_proj.detach(), experts.down_proj.detach())
    x, share_of = torch.randn(tokens, case.dim).bfloat16(), torch.rand(tokens, case.top_k).bfloat16()
    ids = cycle(choices(case, tokens))

    @torch.no_grad()
    def theirs(name: str):
        blocks[name].experts(x, next(ids), share_of)

    calls = {name: partial(theirs, name) for name in blocks}
    best = timing.fastest(calls)
    run.note(f"best: {best}")
    return timing.speedup(call, calls[best], 4 if run.quick else 16, warmup=2)


def _bar(name: str, bound: float, unit: str, measure) -> Bar:
    return Bar(name, ">=", bound, unit, measure, kind="ratio")


BARS = [
    *(
        _bar(f"moe_decode {recipe}, T {tokens}", factor * bound, "of the read roof", partial(bandwidth_share, recipe, tokens))
        for tokens, factor in ((1, 1.0), (8, 0.8))
        for recipe, bound in TARGETS.items()
    ),
    *(_bar(f"moe_decode bf16, T {tokens}: over transformers", 1.2, "x", partial(over_transformers, tokens)) for tokens in (1, 8)),
]
