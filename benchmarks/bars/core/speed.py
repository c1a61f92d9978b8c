"""Speed beside peers, as ratios of medians of interleaved calls in one process."""

from functools import partial

import torch

from benchmarks import peers, timing
from benchmarks.bars.harness import Bar, Run
from benchmarks.cases import QWEN3, MoECase
from mxmoe import grouped_mm, moe_layer, quantize

REPEATS = 9  # interleaved pairs


def quantize_over_memcpy(run: Run) -> float:
    """Bytes/s of MXFP8 quantize (BF16 [8192, 7168], row copy, preallocated) over bytes/s of a BF16 copy (preallocated); bytes are
    those read and those written."""
    x = torch.randn(run.count(8192, least=128), 7168).bfloat16()
    copy, out = torch.empty_like(x), quantize(x, "mxfp8")
    times = timing.medians({"copy": lambda: copy.copy_(x), "quantize": lambda: quantize(x, "mxfp8", out=out)}, REPEATS, warmup=2)
    return ((x.nbytes + out.nbytes) / times["quantize"]) / (2 * x.nbytes / times["copy"])


def grouped_mm_speedup(format: str, run: Run) -> float:
    """torch._grouped_mm's time over ours: 4096 rows over 64 experts, 2048 outputs, contraction 1024, outputs preallocated where
    the call allows (torch's does not)."""
    rows, outputs, length, experts = run.count(4096, least=128), 2048, 1024, 64
    a, w = torch.randn(rows, length).bfloat16(), torch.randn(experts, outputs, length).bfloat16()
    offs = (torch.arange(1, experts + 1) * rows // experts).int()
    out = torch.empty(rows, outputs, dtype=torch.bfloat16)
    ours = (a, w) if format == "bf16" else (quantize(a, format), quantize(w, format))
    w_t = w.transpose(1, 2)
    return timing.speedup(lambda: grouped_mm(*ours, offs, out=out), lambda: torch._grouped_mm(a, w_t, offs=offs), REPEATS)


def layer_speedup(recipe: str, run: Run) -> float:
    """Time of forward and backward of transformers' fastest implementation over moe_layer's, weight quantization included."""
    case = MoECase("scaled", 64, 64, 32, 8, 2) if run.quick else QWEN3
    x, dy = (torch.randn(case.tokens, case.dim).bfloat16() for _ in range(2))
    blocks = peers.qwen3_blocks(case)
    seconds = timing.medians({name: partial(peers.forward_backward, b, x, dy) for name, b in blocks.items()}, 1, warmup=0)
    block = blocks[min(seconds, key=seconds.get)]
    weights = [
        w.detach().clone().requires_grad_() for w in (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    ]

    def ours():
        leaf = x.clone().requires_grad_()
        moe_layer(leaf, *weights, top_k=case.top_k, recipe=recipe)[0].backward(dy)
        for w in weights:
            w.grad = None

    return timing.speedup(ours, partial(peers.forward_backward, block, x, dy), REPEATS)


def _ratio(name: str, bound: float, measure) -> Bar:
    return Bar(name, ">=", bound, "x", measure, kind="ratio")


BARS = [
    _ratio("mxfp8 quantize [8192, 7168]: bytes/s over memcpy", 0.5, quantize_over_memcpy),
    *(
        _ratio(f"grouped_mm {format} 4096 x 2048 x 1024, E 64: over torch._grouped_mm", 1.0, partial(grouped_mm_speedup, format))
        for format in ("bf16", "mxfp8")
    ),
    *(
        _ratio(f"moe_layer {recipe} forward + backward: over transformers", 1.0, partial(layer_speedup, recipe))
        for recipe in ("bf16", "mxfp8")
    ),
]
