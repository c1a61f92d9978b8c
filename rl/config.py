"""What decides a run: one flat dataclass, its command line made from its fields."""

import argparse
import math
from dataclasses import dataclass, fields

from rl.actors import Place
from rl.environments import BACKENDS
from rl.objective import Estimator
from rl.rewards import BEHAVIOURS, RewardWeights
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
    context_tokens: int = 0  # a longer conversation is summarized by the model, which goes on from its summary; 0: never
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
    kl_weight: float = 0.0  # of a sample's KL from the base, taken off its reward; 0: no copy of the base is kept
    kl_estimator: str = "k1"  # of that KL: k1 | k3
    hint_weight: float = 0.0  # of the KL of a turn with an invalid call from the same weights told what is wrong with it; 0: none
    effort_weight: float = 0.0  # of the length penalty ((1 + k x)^(1-q) - 1) / (k (1-q)) of a run's effort x
    effort_k: float = 1.0  # its k
    effort_q: float = 0.5  # its q: 0 is a straight line, 1 a logarithm
    open_todos_weight: float = 0.0  # what a run that leaves all its to-dos open costs
    invalid_calls_weight: float = 0.1  # what a run of nothing but invalid calls costs
    failed_calls_weight: float = 0.0  # what a run of nothing but calls that are answered with an error costs
    terminal_only_weight: float = 0.0  # what a run with the terminal alone costs
    thinking_in_comments_weight: float = 0.0  # what a run costs all of whose edits carry a chain of thought as comments
    needless_questions_weight: float = 0.0  # what a run costs that asks and changes nothing
    eval_every: int = 10  # steps between two evaluations on held-out tasks; 0: none
    eval_tasks: int = 32  # held-out tasks of such an evaluation
    heldout_tasks: int = 200  # held-out tasks of the evaluations before and after; 0: neither
    heldout_samples: int = 8  # samples of each of them
    save_every: int = 5  # steps between two checkpoints of the learner
    trackers: str = "tensorboard"  # of tensorboard, wandb, trackio

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            least = 0 if f.name in ("seed", "max_staleness", "eval_every", "steps", "heldout_tasks", "context_tokens") else 1
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
        if self.context_tokens >= self.capacity:
            raise ValueError(f"context_tokens must be less than capacity, got {self.context_tokens} and {self.capacity}")
        if self.effort_k <= 0:
            raise ValueError(f"effort_k must be positive, got {self.effort_k}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}: samples that are all alike teach nothing")

    @property
    def reward_weights(self) -> RewardWeights:
        behaviours = {name: cost for name in BEHAVIOURS if (cost := getattr(self, f"{name}_weight"))}
        return RewardWeights(self.effort_weight, self.effort_k, self.effort_q, behaviours)


CHOICES = {
    "dialect": ("terse", "chat"),
    "backend": tuple(BACKENDS),
    "place": Place.__args__,
    "correction": ("none", "token_clip", "token_mask", "sequence_mask"),
    "kl_estimator": Estimator.__args__,
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
