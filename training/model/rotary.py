"""Rotary position embeddings, plain or stretched by YaRN.

The pair i of a head's rotary features turns by position * frequency[i]; queries and keys turn alike, so that their product depends
on the distance alone. Letters: T tokens, H heads, P rotary features.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from training.model.config import ModelConfig, Yarn

BLOCK = 256  # positions whose cosines are made together: always the same ones, so that a position's are the same bytes always


def frequencies(config: ModelConfig) -> Tensor:
    """FP32 (P / 2,), radians per position: theta^(-2i / P), stretched."""
    exponent = torch.arange(0, config.rope_dim, 2, dtype=torch.float32) / config.rope_dim
    plain = 1.0 / config.rope_theta**exponent
    return plain if config.yarn is None else _stretched(plain, config.rope_theta, config.yarn)


def _stretched(plain: Tensor, theta: float, yarn: Yarn) -> Tensor:
    pairs = len(plain)

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the original length."""
        return pairs * math.log(yarn.original_length / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001  # no division by zero
    stretch = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - stretch
    return plain / yarn.factor * (1 - kept) + plain * kept


@lru_cache(maxsize=1024)
def _block(config: ModelConfig, block_idx: int, device: torch.device) -> Tensor:
    positions = torch.arange(block_idx * BLOCK, (block_idx + 1) * BLOCK, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies(config).to(device))
    scale = 1.0 if config.yarn is None else config.yarn.rotary_scale
    return torch.stack([angles.cos(), angles.sin()], dim=1) * scale


def rotary_table(config: ModelConfig, length: int, device: torch.device) -> Tensor:
    """Cosines and sines of positions 0 to at least length - 1: FP32 (positions, 2, P / 2)."""
    with torch.inference_mode(False), torch.no_grad():  # kept for calls of any mode
        blocks = [_block(config, block_idx, device) for block_idx in range(max(1, -(-length // BLOCK)))]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def rotate(x_THP: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """Turns the pairs of the last axis, in FP32: neighbours where `interleaved`, else the i-th of both halves.

    cos_sin (T, 2, P / 2). The result lists all first members, then all second. Queries and keys are permuted alike, so their
    products are those of the order they came in.
    """
    cos, sin = cos_sin.unsqueeze(1).unbind(2)
    first, second = (x_THP[..., 0::2], x_THP[..., 1::2]) if interleaved else x_THP.chunk(2, dim=-1)
    first, second = first.float(), second.float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_THP.dtype)
