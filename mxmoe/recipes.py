"""Recipes: which format each GEMM of the layer reads.

| recipe | forward | dgrad | wgrad |
|---|---|---|---|
| fp32 | FP32 | FP32 | FP32 |
| bf16 | BF16 | BF16 | BF16 |
| mxfp8 | MXFP8 x MXFP8 | MXFP8 x MXFP8 | MXFP8 x MXFP8 |
| nvfp4 | NVFP4 (scale per token) x NVFP4 (scale per output row) | MXFP8 | MXFP8 |
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Recipe:
    """Formats of the operands of forward, dgrad and wgrad; `compute_dtype` is the dtype of every unquantized tensor between
    the GEMMs (hidden activations, expert outputs and their gradients)."""

    name: str
    forward: str
    backward: str
    compute_dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class SwiGLU:
    """act(g, u) = g * sigmoid(alpha * g) * (u + offset), with g <= limit and |u| <= limit where a limit is given.

    The defaults are SiLU(g) * u (Llama, DeepSeek, Qwen); gpt-oss is SwiGLU(alpha=1.702, limit=7.0, offset=1.0). ValueError for a
    limit that is not positive.
    """

    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0

    def __post_init__(self):
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit must be positive, or None for no clamp, got {self.limit}")


RECIPES = {
    r.name: r
    for r in (
        Recipe("fp32", "fp32", "fp32", torch.float32),
        Recipe("bf16", "bf16", "bf16"),
        Recipe("mxfp8", "mxfp8", "mxfp8"),
        Recipe("nvfp4", "nvfp4", "mxfp8"),
    )
}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A Recipe by name; a Recipe is returned as it is. ValueError naming the known ones."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    return RECIPES[recipe]
