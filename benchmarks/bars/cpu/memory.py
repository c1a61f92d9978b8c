"""Memory of one forward and backward of the layer, each implementation in a process of its own.

    python -m benchmarks.bars.cpu.memory ours-mxfp8        # prints {"peak": bytes, "saved": bytes}

peak: the largest resident size during the step less the one before it, gradients included; a step on a tiny layer came before, so
that libraries and threads are loaded. saved: distinct storages that autograd keeps between forward and backward, without the
weights, their quantized copies and x, which are there before.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.bars.harness import Bar, Run
from benchmarks.cases import QWEN3, MoECase
from benchmarks.machine import ROOT
from mxmoe import moe_layer, prepare_experts
from mxmoe.autograd import operand_fields

THEIRS = ("eager", "grouped_mm")  # batched_mm would copy 48 GiB of weights
WARM = MoECase("warm", 64, 64, 32, 8, 2)


def resident(field: str) -> int:
    """Bytes: VmRSS now, or VmHWM, the most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def step_of(implementation: str, case: MoECase):
    """(forward, things that are in memory before it): forward() -> y, whose backward is the step's other half."""
    x = torch.randn(case.tokens, case.dim).bfloat16().requires_grad_()
    if not implementation.startswith("ours-"):
        block = peers.qwen3_blocks(case, (implementation,))[implementation]
        return lambda: block(x[None])[0], [x, *block.parameters()]
    recipe = implementation.removeprefix("ours-")
    shapes = (
        (case.num_experts, case.dim),
        (case.num_experts, 2 * case.expert_dim, case.dim),
        (case.num_experts, case.dim, case.expert_dim),
    )
    weights = [(torch.randn(shape) * shape[-1] ** -0.5).bfloat16().requires_grad_() for shape in shapes]
    return lambda **options: moe_layer(x, *weights, top_k=case.top_k, recipe=recipe, **options)[0], [x, *weights]


def storages(tensors) -> dict[int, int]:
    """Bytes of each tensor's memory, by its address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def saved_bytes(forward, present) -> int:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = forward()
    before = storages(present)
    sizes = storages(kept)
    del y
    return sum(size for address, size in sizes.items() if address not in before)


def measure_here(implementation: str, case: MoECase) -> dict[str, int]:
    for size in (WARM, case):
        forward, present = step_of(implementation, size)
        dy = torch.randn(size.tokens, size.dim).bfloat16()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = resident("VmRSS")
        forward().backward(dy)
        peak = resident("VmHWM") - before
    for t in present:
        t.grad = None
    if implementation.startswith("ours-"):
        prepared = prepare_experts(*present[2:], implementation.removeprefix("ours-"))
        forward = partial(forward, prepared=prepared)
        copies = (prepared.w13, prepared.w2, prepared.w13_dgrad, prepared.w2_dgrad)
        present += [t for copy in copies for t in operand_fields(copy)]
    return {"peak": peak, "saved": saved_bytes(forward, present)}


def measure(implementation: str, run: Run) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.bars.cpu.memory", implementation, *(["--quick"] if run.quick else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_over_transformers(recipe: str, run: Run) -> float:
    theirs = {name: measure(name, run)["peak"] for name in THEIRS}
    ours = measure(f"ours-{recipe}", run)["peak"]
    run.note(", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in {f"ours {recipe}": ours, **theirs}.items()))
    return ours / min(theirs.values())


def saved_over_bf16(run: Run) -> float:
    bf16, mxfp8 = (measure(f"ours-{recipe}", run)["saved"] for recipe in ("bf16", "mxfp8"))
    run.note(f"mxfp8 {mxfp8 / 2**20:.0f} MiB, bf16 {bf16 / 2**20:.0f} MiB")
    return mxfp8 / bf16


BARS = [
    *(
        Bar(f"moe_layer {recipe} step: peak memory over transformers", "<=", 1, "x", partial(peak_over_transformers, recipe))
        for recipe in ("bf16", "mxfp8")
    ),
    Bar("moe_layer mxfp8: saved activations over bf16", "<=", 0.6, "x", saved_over_bf16),
]

if __name__ == "__main__":
    print(json.dumps(measure_here(sys.argv[1], WARM if "--quick" in sys.argv else QWEN3)))
