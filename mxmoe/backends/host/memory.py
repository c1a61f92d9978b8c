"""Tensors on kept memory (csrc/host/memory.h)."""

import torch
from torch import Tensor

from mxmoe.backends.host.extension import _C
from mxmoe.layout import dense_strides

MIN_BYTES = 2**21  # one huge page; the C library keeps smaller blocks itself


def empty(shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    size = torch.Size(shape)
    num_bytes = size.numel() * dtype.itemsize
    if num_bytes < MIN_BYTES:
        return torch.empty(size, dtype=dtype, device=device)
    storage = torch.frombuffer(_C.Block(num_bytes), dtype=torch.uint8, count=num_bytes).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, size, dense_strides(size))


memory_stats = _C.memory_stats
empty_cache = _C.release_kept_memory
