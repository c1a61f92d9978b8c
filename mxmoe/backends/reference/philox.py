"""Philox4x32-10, the counter-based generator of stochastic rounding (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011): word i of a stream is a function of (seed, stream, i) alone, so results do not depend on the order of work.
"""

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def philox(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Ten rounds over four int64 tensors that hold 32-bit words; key = (low, high)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        (high0, low0), (high2, low2) = _multiply(c0, MULTIPLIERS[0]), _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + KEY_STEPS[0] & MASK, k1 + KEY_STEPS[1] & MASK
    return [c0, c1, c2, c3]


def random_words(count: int, seed: int, stream: int, device: torch.device) -> Tensor:
    """int64 (count,), each a 32-bit word: word i is output i & 3 of the counter (i >> 2 low, i >> 2 high, stream, 0)."""
    block = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    counter = [block & MASK, block >> 32, torch.full_like(block, stream), torch.zeros_like(block)]
    return torch.stack(philox(counter, (seed & MASK, seed >> 32 & MASK)), dim=1).flatten()[:count]


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    product = a * b  # wraps to the low 64 bits, which are the whole unsigned product
    return product >> 32 & MASK, product & MASK
