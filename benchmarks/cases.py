"""Shapes that the benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoECase:
    """One layer: T tokens of width D, E experts of width F, K of them per token."""

    name: str
    tokens: int
    dim: int
    expert_dim: int
    num_experts: int
    top_k: int

    @property
    def rows(self) -> int:
        """Routed rows N."""
        return self.tokens * self.top_k

    @property
    def shape(self) -> str:
        return f"{self.name}: T {self.tokens} D {self.dim} F {self.expert_dim} E {self.num_experts} K {self.top_k}"


@dataclass(frozen=True)
class Shape:
    """The experts of a published model's layer, for the scoreboard."""

    name: str
    dim: int
    expert_dim: int
    num_experts: int
    top_k: int
    router: tuple[int, int] = (0, 0)  # experts and top-k of the whole layer, where this is a part of it
    gpt_oss: bool = False  # biases, clamped SwiGLU, gate and up interleaved, weights stored transposed

    @property
    def expert_bytes(self) -> int:
        """Of one expert's weights in BF16."""
        return 2 * 3 * self.dim * self.expert_dim


# One of 32 expert-parallel ranks of DeepSeek-V3 and Kimi K2: its "tokens" are the rows that reach it, each for one expert.
SHAPES = (
    Shape("tiny", 256, 256, 32, 4),
    Shape("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Shape("DeepSeek-V3, 8 of 256 experts", 7168, 2048, 8, 1, router=(256, 8)),
    Shape("Kimi K2, 12 of 384 experts", 7168, 2048, 12, 1, router=(384, 8)),
    Shape("gpt-oss-20b", 2880, 2880, 32, 4, gpt_oss=True),
)

TINY = MoECase("tiny", tokens=2048, dim=256, expert_dim=256, num_experts=32, top_k=4)  # the demo's model
QWEN3 = MoECase("qwen3-moe", tokens=2048, dim=1024, expert_dim=512, num_experts=64, top_k=8)  # Qwen3-30B-A3B at half size
KIMI = MoECase("kimi-k2", tokens=512, dim=1792, expert_dim=512, num_experts=48, top_k=8)  # Kimi K2 at 1/4 of D and F, 1/8 of E
CASES = (TINY, QWEN3, KIMI)
