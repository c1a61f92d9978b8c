"""`ModelConfig`: sizes, routing and arithmetic of one model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mxmoe.recipes import RECIPES


@dataclass(frozen=True)
class Yarn:
    """Rotary embeddings stretched to `factor` times the length that the model was pretrained on (YaRN, arXiv 2309.00071).

    A pair of features that turns more than `beta_fast` times over `original_length` positions keeps its frequency, one that turns
    less than `beta_slow` times has it divided by `factor`, those between are interpolated (`truncate`: between whole pairs).
    """

    factor: float
    original_length: int  # positions
    beta_fast: float = 32.0  # turns
    beta_slow: float = 1.0  # turns
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None  # of cosine and sine; None: from the mscales, or from the factor alone
    truncate: bool = True

    @property
    def rotary_scale(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_scale(self) -> float:
        """What DeepSeek's attention multiplies its scores by, for all features and not only the rotary ones."""
        return self._mscale(self.mscale_all_dim or 0.0) ** 2

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and routing of one model; the defaults not given are Kimi-K2's. Attention is latent (MLA) where `kv_lora_rank` is given
    and grouped-query (GQA) where `num_kv_heads` and `head_dim` are: ValueError for both or neither."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    dense_dim: int  # width of the dense layers' SwiGLU
    num_experts: int
    top_k: int
    expert_dim: int
    kv_lora_rank: int | None = None  # MLA: width of the latent that keys and values are made from
    qk_nope_dim: int = 0  # MLA: per head, without position
    qk_rope_dim: int = 0  # MLA: per head, rotary
    v_dim: int = 0  # MLA: per head
    q_lora_rank: int | None = None  # MLA: None: queries are one projection
    num_kv_heads: int | None = None  # GQA
    head_dim: int | None = None  # GQA
    qk_norm: bool = True  # GQA: norms of each head's query and key
    dense_layers: tuple[int, ...] = (0,)  # layers without experts
    num_shared_experts: int = 1  # one SwiGLU of num_shared_experts * expert_dim
    score: str = "sigmoid"  # of the router: sigmoid | softmax
    selection_bias: bool = True  # an FP32 buffer added to the scores for the choice of experts only
    num_groups: int = 1
    groups_kept: int = 1
    normalize: bool = True
    route_scale: float = 2.827
    max_positions: int = 4096  # longest sequence the model is meant for
    rope_theta: float = 50000.0
    rope_interleaved: bool = True  # rotary pairs are neighbours; otherwise the i-th of each half
    yarn: Yarn | None = None
    norm_eps: float = 1e-6
    recipe: str = "bf16"
    recompute: bool = False  # of the experts' activations in the backward
    deterministic: bool = False  # a token's logits do not depend, to the bit, on what it is computed together with

    def __post_init__(self):
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {self.recipe!r}")
        if (self.kv_lora_rank is None) == (self.num_kv_heads is None or self.head_dim is None):
            raise ValueError(
                "either kv_lora_rank (MLA) or num_kv_heads and head_dim (GQA) must be given, got "
                f"{self.kv_lora_rank}, {self.num_kv_heads} and {self.head_dim}"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}")
        if self.rope_dim % 2:
            raise ValueError(f"rotary features must come in pairs, got {self.rope_dim}")
        if not all(0 <= layer_idx < self.num_layers for layer_idx in self.dense_layers):
            raise ValueError(f"dense_layers must be among {self.num_layers} layers, got {self.dense_layers}")

    @property
    def is_latent(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def rope_dim(self) -> int:
        """Rotary features of a head."""
        return self.qk_rope_dim if self.is_latent else self.head_dim

    @property
    def qk_dim(self) -> int:
        return self.qk_nope_dim + self.qk_rope_dim if self.is_latent else self.head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_dim**-0.5 * (self.yarn.softmax_scale if self.yarn and self.is_latent else 1.0)

    @property
    def dense_recipe(self) -> str:
        """Of attention, dense layers and head."""
        return "fp32" if self.recipe == "fp32" else "bf16"

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of queries, keys, values, and of what the cache holds."""
        return RECIPES[self.dense_recipe].compute_dtype
