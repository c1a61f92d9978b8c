"""moe_layer beside the floor of its GEMMs, transformers' Qwen3-MoE block and our own BF16: D 1024, F 512, E 64, K 8, T 2048.

Weights in low precision are quantized on every call, as after an optimizer step.
"""

from functools import partial

import torch

from benchmarks import peers, timing
from benchmarks.bars.harness import Bar, Run
from benchmarks.cases import QWEN3, MoECase
from benchmarks.ceilings import peak, share
from mxmoe import moe_layer


def repeats(run: Run) -> int:
    return 3 if run.quick else 9


def case_of(run: Run) -> MoECase:
    return MoECase("scaled", 64, 64, 32, 8, 2) if run.quick else QWEN3


class Setting:
    """Inputs, transformers' blocks and our calls, on the same weights."""

    def __init__(self, case: MoECase):
        self.case = case
        self.x, self.dy = (torch.randn(case.tokens, case.dim).bfloat16() for _ in range(2))
        self.blocks = peers.qwen3_blocks(case)
        block = next(iter(self.blocks.values()))
        self.weights = [
            w.detach().clone().requires_grad_() for w in (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
        ]

    def forward(self, recipe: str):
        with torch.no_grad():
            moe_layer(self.x, *self.weights, top_k=self.case.top_k, recipe=recipe)

    def forward_backward(self, recipe: str):
        leaf = self.x.clone().requires_grad_()
        moe_layer(leaf, *self.weights, top_k=self.case.top_k, recipe=recipe)[0].backward(self.dy)
        for w in self.weights:
            w.grad = None

    def their_forward(self, name: str):
        with torch.no_grad():
            self.blocks[name](self.x[None])

    def their_forward_backward(self, name: str):
        peers.forward_backward(self.blocks[name], self.x, self.dy)


def forward_over_floor(run: Run) -> float:
    s = Setting(case_of(run))
    flops = 6.0 * s.case.rows * s.case.dim * s.case.expert_dim
    return 1 / share(partial(s.forward, "bf16"), flops, peak(flops), repeats(run))


def over_transformers(step: str, run: Run) -> float:
    s = Setting(case_of(run))
    theirs = {name: partial(getattr(s, f"their_{step}"), name) for name in s.blocks}
    best = timing.fastest(theirs)
    run.note(f"best: {best}")
    return timing.speedup(partial(getattr(s, step), "bf16"), theirs[best], repeats(run))


def over_bf16(recipe: str, run: Run) -> float:
    s = Setting(case_of(run))
    return timing.ratio(partial(s.forward_backward, recipe), partial(s.forward_backward, "bf16"), repeats(run))


def _bar(name: str, compare: str, bound: float, unit: str, measure) -> Bar:
    return Bar(name, compare, bound, unit, measure, kind="ratio")


BARS = [
    _bar("moe_layer bf16 forward: over its GEMMs at the peak", "<=", 1.25, "x", forward_over_floor),
    _bar("moe_layer bf16 forward: over transformers", ">=", 1.5, "x", partial(over_transformers, "forward")),
    _bar("moe_layer bf16 forward + backward: over transformers", ">=", 2, "x", partial(over_transformers, "forward_backward")),
    _bar("moe_layer mxfp8 forward + backward: over our bf16", "<=", 1.3, "x time", partial(over_bf16, "mxfp8")),
    _bar("moe_layer nvfp4 forward + backward: over our bf16", "<=", 1.4, "x time", partial(over_bf16, "nvfp4")),
]
