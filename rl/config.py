"""What decides a run: one flat dataclass, its command line made from its fields."""

import argparse
import math
from dataclasses import dataclass, fields

from rl.actors import Place
from rl.environments import BACKENDS
from training.config import field_help
from training.metrics import TRACKERS


@dataclass(frozen=True)
class RunConfig:
    """The comment of a field is its help text."""

    run_dir: str = "runs/rl"  # where state, weights, rollouts, metrics and TensorBoard events go
    base: str = ""  # run, checkpoint or Hugging Face directory to begin with; empty: the tiny base, made where it is not cached
    cache_dir: str = ".cache/mxmoe"  # where the tiny base is kept between runs
    tasks: str = "tiny"  # `tiny`: the tiny family; or a directory of task directories
    dialect: str = "terse"  # how conversations are written: terse | chat
    backend: str = "namespaces"  # of sandboxes
    place: str = "ray"  # of samplers and learner: ray | inline
    address: str = ""  # of a Ray cluster; empty: one of this machine, made for the run
    samplers: int = 1  # actors that sample
    sampler_gpus: float = 0.0  # of each sampler
    learner_gpus: float = 0.0  # of the learner
    threads: int = 1  # of each actor's arithmetic
    seed: int = 0  # of prompts and of what is sampled
    steps: int = 40  # of the learner
    group_size: int = 8  # samples of a prompt
    groups_per_step: int = 16  # prompts of a step
    max_staleness: int = 2  # versions that a trained token may be old; 0: sampling and training take turns
    workers: int = 64  # samples under way at once
    slots: int = 64  # of a sampler: answers under way and prompts kept
    capacity: int = 640  # tokens of a conversation
    reply_tokens: int = 48  # of a reply, at most
    turns: int = 10  # replies of a sample, at most
    seconds: float = 120.0  # of a sample's work, at most
    temperature: float = 1.0  # of sampling
    lr: float = 3e-4  # of AdamW, constant
    clip_norm: float = 1.0  # largest norm of the gradient
    correction: str = "token_clip"  # of tokens that older weights sampled: none | token_clip | token_mask | sequence_mask
    standardize: bool = False  # divide advantages by the group's deviation
    replay: bool = True  # train with the experts that the sampler chose
    recompute: bool = False  # on new weights, read again what answers under way hold
    deterministic: bool = False  # the model's deterministic mode: the same bytes in any company
    recipe: str = ""  # of the experts' GEMMs in both; empty: the base's
    micro_tokens: int = 8192  # of a micro-batch
    effort_weight: float = 0.0  # of the length penalty
    invalid_weight: float = 0.1  # what a run of nothing but invalid calls costs
    eval_every: int = 10  # steps between two evaluations on held-out tasks; 0: none
    eval_tasks: int = 32  # held-out tasks of such an evaluation
    heldout_tasks: int = 200  # held-out tasks of the evaluations before and after; 0: neither
    heldout_samples: int = 8  # samples of each of them
    save_every: int = 5  # steps between two checkpoints of the learner
    trackers: str = "tensorboard"  # of tensorboard, wandb, trackio

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            least = 0 if f.name in ("seed", "max_staleness", "eval_every", "steps", "heldout_tasks") else 1
            if f.type is int and value < least:
                raise ValueError(f"{f.name} must be at least {least}, got {value}")
            if f.type is float and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{f.name} must be a finite number of at least 0, got {value}")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if unknown := {name.strip() for name in self.trackers.split(",")} - {*TRACKERS, ""}:
            raise ValueError(f"trackers must be of {', '.join(TRACKERS)}, got {', '.join(sorted(unknown))}")
        if self.reply_tokens >= self.capacity:
            raise ValueError(f"reply_tokens must be less than capacity, got {self.reply_tokens} and {self.capacity}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}: samples that are all alike teach nothing")


CHOICES = {
    "dialect": ("terse", "chat"),
    "backend": tuple(BACKENDS),
    "place": Place.__args__,
    "correction": ("none", "token_clip", "token_mask", "sequence_mask"),
}
# What a resumed run may change; everything else is as it was saved.
CHANGEABLE = ("steps", "place", "address", "samplers", "threads", "workers", "eval_every", "save_every", "trackers", "cache_dir")


def add_arguments(parser: argparse.ArgumentParser, defaults: dict | None = None) -> None:
    """One option per field. An option that is not given is absent from the parsed namespace."""
    defaults = defaults or {}
    for f in fields(RunConfig):
        about = f"{field_help(RunConfig)[f.name].replace('%', '%%')} (default: {defaults.get(f.name, f.default)!r})"
        kind = dict(action=argparse.BooleanOptionalAction) if f.type is bool else dict(type=f.type, metavar=f.type.__name__.upper())
        if f.name in CHOICES:
            kind = dict(choices=CHOICES[f.name])
        parser.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, help=about, **kind)
