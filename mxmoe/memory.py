"""Memory of results. Touching fresh memory costs ten times what writing it costs, so on a CPU large results lie on blocks that
go back to a pool when their last tensor is gone, huge pages where the system grants them.

The pool's bound: blocks in use and blocks kept are never more together than 9/8 of the most that was in use at one time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxmoe import backends


class MemoryStats(NamedTuple):
    """Bytes of large results: of living tensors, of blocks kept for the next ones, and the most ever in use at one time."""

    in_use: int
    kept: int
    peak: int


def memory_stats() -> MemoryStats:
    """What the pool of the CPU's results holds."""
    return MemoryStats(*backends.get("host").memory_stats())


def empty_cache():
    """Give kept blocks back to the system; the peak starts anew from what is in use."""
    backends.get("host").empty_cache()


def empty(shape, dtype: torch.dtype, like: Tensor, backend: str) -> Tensor:
    """An uninitialised dense tensor on `like`'s device: from the backend's memory, or plainly where torch is tracing."""
    if type(like) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return torch.empty(shape, dtype=dtype, device=like.device)
    return backends.get(backend).empty(shape, dtype, like.device)
