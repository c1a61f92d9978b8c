"""Every number of the demo: the tiny model, its tasks, the demonstrations it starts from, and the reinforcement learning."""

from dataclasses import asdict, dataclass

from training.model import ModelConfig


@dataclass(frozen=True)
class Demonstrations:
    """How the scripted expert behaves: it leaves room that reinforcement learning can find."""

    quits: float = 0.35  # share that reads and finishes
    careless: float = 0.55  # of the others, share that edits once and finishes without a test
    careless_mistakes: float = 0.4  # of these, share whose edit is wrong
    mistakes: float = 0.45  # of the careful ones' edits, share that is wrong; a test follows each
    attempts: int = 4  # edits of a careful one at most
    gives_up: float = 0.25  # share of failed tests after which a careful one finishes


@dataclass(frozen=True)
class BaseRecipe:
    """Model, tokenizer and supervised training: what `rl.demo.base.make_base` makes. A base is kept by a digest of these."""

    vocab_size: int = 512
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_experts: int = 8
    top_k: int = 2
    expert_dim: int = 96
    kv_lora_rank: int = 64
    recipe: str = "fp32"  # of the experts' products, see mxmoe.recipes
    difficulties: tuple[int, ...] = (1, 2, 3, 4)  # steps of a task's function
    kinds: tuple[str, ...] = ("write", "fix", "extend")
    demonstrations: Demonstrations = Demonstrations()
    num_modules: int = 6000  # functions as plain text, what pretraining reads
    num_demonstrations: int = 14000
    pretrain_steps: int = 120
    sft_steps: int = 480
    batch_tokens: int = 4096  # of a step, about
    lr: float = 5e-3  # peak, of embedding, head, routers and norms
    muon_lr: float = 1e-2  # peak, of the matrices inside the layers
    warmup_steps: int = 30
    clip_norm: float = 1.0
    bias_speed: float = 2e-3  # step of the routers' selection bias towards balanced experts
    max_length: int = 512  # tokens of a conversation

    @property
    def model(self) -> ModelConfig:
        head_dim = self.dim // self.num_heads
        return ModelConfig(
            vocab_size=self.vocab_size,
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            dense_dim=(self.top_k + 1) * self.expert_dim,
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_dim=self.expert_dim,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_dim=head_dim // 2,
            qk_rope_dim=head_dim // 2,
            v_dim=head_dim,
            route_scale=1.0,
            max_positions=self.max_length,
            rope_theta=10000.0,
            recipe=self.recipe,
        )


@dataclass(frozen=True)
class RLRecipe:
    """The reinforcement learning that starts from a base."""

    lr: float = 3e-4
    group_size: int = 8
    groups_per_step: int = 16
    steps: int = 40
    turns: int = 8  # replies of a rollout at most
    reply_tokens: int = 64  # of a reply at most
    temperature: float = 1.0
    correction: str = "token_clip"
    clip_norm: float = 1.0
    micro_tokens: int = 8192
    effort: float = 0.0  # weight of the length penalty
    failed_calls_weight: float = 0.1  # what a rollout of nothing but calls answered with an error costs
    heldout_tasks: int = 200
    samples: int = 8  # rollouts of each held-out task: mean, and best of so many

    @property
    def run_config(self) -> dict:
        """As fields of `rl.config.RunConfig`."""
        own = {name: value for name, value in asdict(self).items() if name not in ("effort", "samples")}
        return own | {"run_dir": "runs/rl-demo", "effort_weight": self.effort, "heldout_samples": self.samples}
