"""Configuration of a run: two flat dataclasses (sizes and rates; what phases differ in), presets, and the command line made from
their fields."""

import argparse
import inspect
import re
from dataclasses import asdict, dataclass, field, fields
from math import isfinite

from mxmoe.recipes import RECIPES
from training.model import ModelConfig
from training.phases import PHASES, Phase


@dataclass(frozen=True)
class Config:
    """Everything that decides a run. The comment of a field is its help text; defaults are the preset `tiny`."""

    run_dir: str = "runs/run"  # where checkpoints, metrics and TensorBoard events go
    cache_dir: str = ".cache/mxmoe"  # where the tokenizer and the token files are kept between runs
    corpus: str = ""  # sources with weights, `stdlib:3,chats.jsonl:1`; empty: standard library and pure-Python packages
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
    eval_every: int = 50  # steps between two held-out losses
    eval_windows: int = 32  # windows of the held-out loss
    save_every: int = 200  # steps between two checkpoints; one is always written at the end and on Ctrl-C
    phase: Phase = field(default_factory=Phase)  # what phases differ in

    def __post_init__(self):
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {self.recipe!r}")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type is int and f.name not in ("seed", "warmup_steps") and value < 1:
                raise ValueError(f"{f.name} must be at least 1, got {value}")
            if f.type is float and not (isfinite(value) and value >= 0):
                raise ValueError(f"{f.name} must be a finite number of at least 0, got {value}")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be greater than 0, got {self.clip_norm}")
        if self.warmup_steps < 0 or not 0 <= self.seed < 2**63:
            raise ValueError(f"warmup_steps and seed must be at least 0, seed below 2**63, got {self.warmup_steps} and {self.seed}")
        if self.num_layers < 2:
            raise ValueError(f"num_layers must be at least 2 (the first has no experts), got {self.num_layers}")
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
PROGRAMS = (Config, Phase)
SIZES = ("vocab_size", "dim", "num_layers", "num_heads", "num_experts", "top_k", "expert_dim")  # of a model, kept by later phases

# What a resumed run may change; everything else comes from its checkpoint.
CHANGEABLE = (
    "steps", "weight_decay", "clip_norm", "eval_every", "save_every", "lr", "cache_dir",
    "schedule", "decay", "final_lr", "bad_steps", "keep", "workers", "trackers", "recompute",
)  # fmt: skip


def configure(**values) -> Config:
    """Config from a flat dict of fields of Config and of Phase."""
    of_phase = {f.name: values.pop(f.name) for f in fields(Phase) if f.name in values}
    return Config(**values, phase=Phase(**of_phase))


def flat(config: Config) -> dict:
    """The inverse of `configure`."""
    values = asdict(config)
    return values | values.pop("phase")


def changed(config: Config, **values) -> Config:
    """A copy with other values of fields of either dataclass."""
    return configure(**flat(config) | values)


def field_help(program: type = Config) -> dict[str, str]:
    """Field name -> its comment in the source."""
    return dict(re.findall(r"^    (\w+): \w+ = .*?  # (.*)$", inspect.getsource(program), re.MULTILINE))


def add_arguments(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = (), defaults: dict | None = None) -> None:
    """One option per field of Config and of Phase. An option that is not given is absent from the parsed namespace."""
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="sizes where none are given (default: tiny)")
    parser.add_argument("--phase", choices=PHASES, default="bulk", help="phase whose values fill what is not given (default: bulk)")
    defaults = defaults or {}
    for program in PROGRAMS:
        group = parser.add_argument_group(program.__name__.lower())
        for f in fields(program):
            if f.name in (*without, "phase"):
                continue
            is_flag = f.type is bool
            group.add_argument(
                "--" + f.name.replace("_", "-"),
                default=argparse.SUPPRESS,
                help=f"{field_help(program)[f.name].replace('%', '%%')} (default: {defaults.get(f.name, f.default)!r})",
                **(dict(action=argparse.BooleanOptionalAction) if is_flag else dict(type=f.type)),
                **(
                    dict(choices=tuple(RECIPES)) if f.name == "recipe" else {} if is_flag else dict(metavar=f.type.__name__.upper())
                ),
            )


def given(namespace: argparse.Namespace) -> dict:
    """The fields that the command line named."""
    names = {f.name for program in PROGRAMS for f in fields(program)} - {"phase"}
    return {name: value for name, value in vars(namespace).items() if name in names}


def from_command_line(namespace: argparse.Namespace, defaults: dict | None = None, sizes: dict | None = None) -> Config:
    """What is given wins over the phase's values, these over the sizes (of the model that it begins with), these over the preset's
    and the defaults. A phase that stretches positions has rows longer by as much, and fewer of them."""
    values = (defaults or {}) | PRESETS[namespace.preset] | (sizes or {}) | PHASES[namespace.phase]
    stretch = PHASES[namespace.phase].get("yarn", 1)
    base = Config(**{name: values[name] for name in ("seq_len", "batch_size") if name in values})
    longer = dict(seq_len=int(base.seq_len * stretch), batch_size=max(1, int(base.batch_size / stretch)))
    return configure(**values | longer | given(namespace))
