"""Configuration of a run: one flat dataclass, presets, and the command line made from its fields."""

import argparse
import inspect
import re
from dataclasses import dataclass, fields
from math import isfinite

from mxmoe.recipes import RECIPES
from training.model import ModelConfig


@dataclass(frozen=True)
class Config:
    """Everything that decides a run. The comment of a field is its help text; defaults are the preset `tiny`."""

    run_dir: str = "runs/run"  # where checkpoints, metrics and TensorBoard events go
    cache_dir: str = ".cache/mxmoe"  # where the tokenizer and the token files are kept between runs
    corpus: str = ""  # directory of *.py files to train on; empty: the standard library of this Python
    recipe: str = "mxfp8"  # formats of the experts' GEMMs: fp32 | bf16 | mxfp8 | nvfp4
    seed: int = 0  # of the initial weights and of the order of the data
    vocab_size: int = 8192  # tokens
    dim: int = 256  # model width
    num_layers: int = 6  # the first is dense, the others have experts
    num_heads: int = 4  # attention heads
    num_experts: int = 32  # routed experts per layer; one shared expert comes on top
    top_k: int = 4  # routed experts per token
    expert_dim: int = 256  # width of an expert
    seq_len: int = 512  # tokens per window
    batch_size: int = 4  # windows per micro-batch
    accumulation: int = 1  # micro-batches per step
    steps: int = 1000  # optimizer steps in all; the learning rate reaches 0 after the last
    warmup_steps: int = 20  # steps of linear warm-up
    lr: float = 1e-3  # peak learning rate
    weight_decay: float = 0.1  # per unit of learning rate, on matrices only
    clip_norm: float = 1.0  # largest norm of the gradient
    bias_speed: float = 5e-3  # step of the selection bias towards balanced experts, per optimizer step
    balance_loss: float = 0.0  # weight of the load-balance loss, summed over layers
    eval_every: int = 50  # steps between two held-out losses
    eval_windows: int = 32  # windows of the held-out loss
    save_every: int = 200  # steps between two checkpoints; one is always written at the end and on Ctrl-C

    def __post_init__(self):
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {self.recipe!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and field.name not in ("seed", "warmup_steps") and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
            if field.type is float and not (isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} must be a finite number of at least 0, got {value}")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be greater than 0, got {self.clip_norm}")
        if self.warmup_steps < 0 or not 0 <= self.seed < 2**63:
            raise ValueError(f"warmup_steps and seed must be at least 0, seed below 2**63, got {self.warmup_steps} and {self.seed}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be at most num_experts, got {self.top_k} and {self.num_experts}")
        if self.dim % (4 * self.num_heads):
            raise ValueError(f"dim must be a multiple of 4 * num_heads, got {self.dim} and {self.num_heads}")

    @property
    def model(self) -> ModelConfig:
        """Sizes that the run does not name follow from the width, in Kimi-K2's proportions."""
        head_dim = self.dim // self.num_heads
        return ModelConfig(
            vocab_size=self.vocab_size,
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            dense_dim=(self.top_k + 1) * self.expert_dim,  # as many active parameters as a layer with experts
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_dim=self.expert_dim,
            q_lora_rank=self.dim // 2,
            kv_lora_rank=self.dim // 4,
            qk_nope_dim=head_dim // 2,
            qk_rope_dim=head_dim // 2,
            v_dim=head_dim,
            recipe=self.recipe,
        )

    @property
    def tokens_per_step(self) -> int:
        return self.accumulation * self.batch_size * self.seq_len


PRESETS = {
    "tiny": {},
    "micro": dict(
        vocab_size=512, dim=64, num_layers=2, num_heads=2, num_experts=4, top_k=2, expert_dim=64, seq_len=32,
        batch_size=4, steps=20, warmup_steps=2, eval_every=10, eval_windows=4, save_every=10,
    ),
}  # fmt: skip

# What a resumed run may change; everything else comes from its checkpoint.
CHANGEABLE = ("steps", "weight_decay", "clip_norm", "eval_every", "save_every", "lr", "cache_dir")


def field_help() -> dict[str, str]:
    """Field name -> its comment in the source above."""
    return dict(re.findall(r"^    (\w+): \w+ = .*?  # (.*)$", inspect.getsource(Config), re.MULTILINE))


def add_arguments(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = (), defaults: dict | None = None) -> None:
    """One option per field of Config. An option that is not given is absent from the parsed namespace."""
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="values of everything not given (default: tiny)")
    defaults = defaults or {}
    for field in fields(Config):
        if field.name not in without:
            default = defaults.get(field.name, field.default)
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                type=field.type,
                choices=tuple(RECIPES) if field.name == "recipe" else None,
                default=argparse.SUPPRESS,
                metavar=field.type.__name__.upper() if field.name != "recipe" else None,
                help=f"{field_help()[field.name]} (default: {default!r})",
            )


def given(namespace: argparse.Namespace) -> dict:
    """The fields of Config that the command line named."""
    names = {field.name for field in fields(Config)}
    return {name: value for name, value in vars(namespace).items() if name in names}
