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


TINY = MoECase("tiny", tokens=2048, dim=256, expert_dim=256, num_experts=32, top_k=4)  # the demo's model
QWEN3 = MoECase("qwen3-moe", tokens=2048, dim=1024, expert_dim=512, num_experts=64, top_k=8)  # Qwen3-30B-A3B at half size
KIMI = MoECase("kimi-k2", tokens=512, dim=1792, expert_dim=512, num_experts=48, top_k=8)  # Kimi K2 at 1/4 of D and F, 1/8 of E
CASES = (TINY, QWEN3, KIMI)
