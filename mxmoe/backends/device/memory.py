"""Tensors as the kernels' copies take them."""

from contextlib import contextmanager

import torch
from torch import Tensor


def empty(shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def for_tma(x: Tensor) -> Tensor:
    """The same values in rows that TMA takes: dense, 16 bytes aligned and apart; copied where they are not."""
    pitch = 16 // x.element_size()
    regular = x.stride(-1) == 1 and x.stride(-2) % pitch == 0 and x.stride(-2) >= x.shape[-1] and x.data_ptr() % 16 == 0
    stacked = x.ndim == 2 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    if regular and stacked:
        return x
    rows = x.new_empty(*x.shape[:-1], -(-x.shape[-1] // pitch) * pitch).narrow(-1, 0, x.shape[-1])
    return rows.copy_(x)


@contextmanager
def dense(out: Tensor):
    """`out` with a last dimension of unit stride: itself, or a contiguous copy that is copied back."""
    if out.stride(-1) == 1:
        yield out
        return
    copy = out.contiguous()
    yield copy
    out.copy_(copy)
