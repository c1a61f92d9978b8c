"""The phases of training: presets over one loop.

    bulk   from random weights or a base model, at the base length, on the corpus
    long   short, from the bulk's weights: sequences four times as long, rotary positions stretched by YaRN to match
    sft    short, from there: conversations and tool transcripts, loss on what the assistant says

`init` says whose weights a phase begins with. Its optimizer starts anew, so does its schedule.
"""

import math
import re
from dataclasses import dataclass

from torch import nn

import mxmoe
from training.optimizer import SCHEDULES


@dataclass(frozen=True)
class Phase:
    """What phases differ in, beside lengths, batches and rates. The comment of a field is its help text."""

    phase: str = "bulk"  # name, for reports
    init: str = ""  # run, checkpoint or Hugging Face directory to begin with the weights of; empty: random weights
    tokenizer: str = ""  # tokenizer.json, its directory, or deepseek; empty: that of init, else trained on the corpus
    corpus_mb: int = 10  # at most about this much text of each source
    similarity: float = 0.8  # of two documents from which the second is a copy and dropped; 1: exact copies only
    fim: float = 0.0  # share of documents with their middle moved to the end
    workers: int = 0  # processes that read data ahead
    schedule: str = "cosine"  # of the learning rate: cosine | wsd | linear | constant
    decay: float = 0.2  # share of the steps in which wsd decays
    final_lr: float = 0.0  # of the peak, where the schedule ends
    z_loss: float = 0.0  # weight of the routers' z-loss, summed over layers
    balance_loss: float = 0.0  # weight of the load-balance loss, summed over layers
    high_precision: str = ""  # layers kept in bf16: names (layers.3), last:0.15 (a share), shared; separated by commas
    recompute: bool = False  # the experts' activations in the backward, instead of keeping them
    yarn: float = 1.0  # factor by which the rotary positions are stretched
    bad_steps: int = 0  # steps in a row with a NaN or Inf that are skipped before the run stops
    keep: int = 2  # newest checkpoints that stay
    trackers: str = "tensorboard"  # where metrics go beside metrics.jsonl: tensorboard, wandb, trackio, by commas

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        for name in ("similarity", "fim", "decay", "final_lr"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be within 0 and 1, got {getattr(self, name)}")
        for name in ("z_loss", "balance_loss"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {getattr(self, name)}")
        if not 1.0 <= self.yarn < math.inf:
            raise ValueError(f"yarn must be at least 1, got {self.yarn}")
        for name, least in (("workers", 0), ("bad_steps", 0), ("keep", 1), ("corpus_mb", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        _patterns(self.high_precision)


PHASES = {
    "bulk": {},
    "long": dict(phase="long", yarn=4.0, steps=100, warmup_steps=5, lr=2e-4, schedule="linear"),
    "sft": dict(phase="sft", corpus="chats", steps=60, warmup_steps=5, lr=1e-4, bias_speed=0.0, schedule="linear"),
}


def _patterns(high_precision: str) -> list[str]:
    names = [name.strip() for name in high_precision.split(",") if name.strip()]
    for name in names:
        match = re.fullmatch(r"last:(.+)", name)
        try:
            valid = not match or 0.0 < float(match[1]) <= 1.0
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"high_precision must hold names, shared, or last:SHARE with a share within 0 and 1, got {name!r}")
    return names


def keep_high_precision(model: nn.Module, high_precision: str) -> list[str]:
    """Computes the named MoE layers of the model in bf16 (`shared`: the shared experts of all); returns the layers' names. Router,
    norms, attention and head are never lower than that. ValueError for a name that fits no MoE layer."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, mxmoe.MoE)}
    chosen: dict[str, None] = {}
    for pattern in _patterns(high_precision):
        if pattern == "shared":
            for layer in layers.values():
                layer.options["shared_recipe"] = "bf16"
            continue
        if pattern.startswith("last:"):
            share = float(pattern.removeprefix("last:"))
            fitting = list(layers)[len(layers) - math.ceil(share * len(layers)) :]
        else:
            fitting = [name for name in layers if re.match(re.escape(pattern) + r"(\.|$)", name)]
        if not fitting:
            raise ValueError(f"high_precision names {pattern!r}, which is none of the MoE layers {', '.join(layers)}")
        chosen |= dict.fromkeys(fitting)
    for name in chosen:
        layers[name].recipe = "bf16"
    return list(chosen)
