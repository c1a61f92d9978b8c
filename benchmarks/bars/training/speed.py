"""A training step of the preset `tiny`: recipes beside each other and beside transformers, and where its time goes."""

import statistics
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.bars.harness import Bar, Run
from tests.model_cases import TINY_HF
from training.config import configure
from training.optimizer import guarded_step, make_optimizer
from training.train import Trainer

ROUNDS, STEPS = 7, 10
EXPERTS = ("eager", "grouped_mm")  # transformers' implementations; batched_mm copies an expert for every row, 20 GB here


def trainer(recipe: str) -> Trainer:
    with tempfile.TemporaryDirectory() as name:  # nothing is written there
        return Trainer(configure(recipe=recipe, corpus="stdlib", run_dir=name))


def transformers_step(data, c):
    """A step of the same sizes and the same optimizer by transformers' model, on rows that it reads as one document each; its
    experts by the fastest of EXPERTS. (step, name)"""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**TINY_HF))
    optimizer = make_optimizer(model, c.weight_decay)

    def step(implementation: str):
        model.set_experts_implementation(implementation)
        ids, targets, _ = data.next_batch(c.batch_size)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        guarded_step(optimizer, 1e-4, c.clip_norm)

    best = timing.fastest({name: partial(step, name) for name in EXPERTS})
    return partial(step, best), best


def compared(above: str, run: Run) -> float:
    """Median over the rounds of the time of a step by `above` over that of recipe mxfp8, taken in turns."""
    ours = trainer("mxfp8")
    calls, name = {"mxfp8": ours.train_step}, above
    if above == "transformers":
        calls[above], name = transformers_step(ours.data, ours.config)
    else:
        calls[above] = trainer(above).train_step
    times = timing.interleaved(calls, run.count(ROUNDS, least=1), warmup=2)
    speeds = {provider: ours.config.tokens_per_step / statistics.median(values) for provider, values in times.items()}
    run.note(f"tokens/s: mxfp8 {speeds['mxfp8']:.0f}, {name} {speeds[above]:.0f}; {torch.get_num_threads()} threads")
    return statistics.median(a / b for a, b in zip(times[above], times["mxfp8"], strict=True))


def recipe_cost(run: Run) -> float:
    return 1 / compared("bf16", run)


# --- where the time goes ---------------------------------------------------------------------------------------------


class Clock:
    """Seconds by what is going on; `switch` says what begins now."""

    def __init__(self):
        self.spent: Counter = Counter()
        self.label, self.since = "rest", time.perf_counter()

    def switch(self, label: str) -> None:
        now = time.perf_counter()
        self.spent[self.label] += now - self.since
        self.label, self.since = label, now

    @contextmanager
    def during(self, label: str):
        self.switch(label)
        yield
        self.switch("rest")


class Mark(torch.autograd.Function):
    """The identity; tells the clock what begins in the forward and, in the backward, what begins there."""

    @staticmethod
    def forward(ctx, x: Tensor, clock: Clock, forward: str, backward: str) -> Tensor:
        ctx.clock, ctx.label = clock, backward
        clock.switch(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ctx.clock.switch(ctx.label)
        return dy, None, None, None


def watch(module: nn.Module, clock: Clock, label: str, then: str = "rest") -> None:
    """Time within the module is `label`, what follows its forward is `then`."""

    def before(module, args):
        if args[0].is_floating_point():
            return Mark.apply(args[0], clock, label, "rest"), *args[1:]
        return clock.switch(label)

    def after(module, args, output):
        if isinstance(output, tuple):
            return Mark.apply(output[0], clock, then, label), *output[1:]
        return Mark.apply(output, clock, then, label)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def profile(steps: int) -> dict[str, float]:
    """Label -> share of a step's time, recipe mxfp8. "rest" is what no label explains."""
    t, clock = trainer("mxfp8"), Clock()
    watch(t.model.embed_tokens, clock, "embedding")
    for layer in t.model.layers:
        watch(layer.self_attn, clock, "attention")
        watch(layer.mlp, clock, "experts" if layer.mlp in t.model.moe_layers else "dense layer")
        watch(layer.input_layernorm, clock, "norms")
        watch(layer.post_attention_layernorm, clock, "norms")
    watch(t.model.norm, clock, "norms")
    watch(t.model.lm_head, clock, "head", then="loss")
    read = t.data.next_batch

    def next_batch(size: int):
        with clock.during("data"):
            return read(size)

    def step(*arguments):
        with clock.during("optimizer"):
            return guarded_step(*arguments)

    t.data.next_batch = next_batch
    with patch("training.train.guarded_step", step):
        for _ in range(2):
            t.train_step()
        clock.switch("rest")
        clock.spent.clear()
        for _ in range(steps):
            t.train_step()
    clock.switch("rest")
    return {label: value / clock.spent.total() for label, value in clock.spent.most_common()}


def share(label: str, run: Run) -> float:
    """Of a step's time, %."""
    shares = profile(run.count(STEPS, least=1))
    run.note(", ".join(f"{name} {100 * value:.1f} %" for name, value in shares.items()))
    return 100 * shares[label]


BARS = [
    Bar("step time, mxfp8 / bf16, preset tiny", "<=", 1.15, "x", recipe_cost, kind="ratio"),
    Bar("tokens/s, mxfp8 / transformers' bf16", ">=", 1.5, "x", partial(compared, "transformers"), kind="ratio"),
    Bar("step time that nothing explains", "<=", 5, "%", partial(share, "rest"), kind="ratio"),
    Bar("step time for data", "<", 1, "%", partial(share, "data"), kind="ratio"),
]
