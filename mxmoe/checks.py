"""Argument checks of the public functions: one line each, saying argument, expected and got."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensor(name: str, t, ndim: int | tuple[int, ...], dtypes: tuple[torch.dtype, ...] = FLOATS, like: Tensor | None = None):
    """A dense tensor of one of `dtypes`, with `ndim` dimensions, on the device of `like`."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(dtype_name, dtypes))}, got {dtype_name(t.dtype)}")
    allowed = (ndim,) if isinstance(ndim, int) else ndim
    if t.ndim not in allowed:
        raise ValueError(f"{name} must have {' or '.join(map(str, allowed))} dimensions, got shape {tuple(t.shape)}")
    if t.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense (strided) tensor, got layout {t.layout}")
    if like is not None:
        check_device(name, t, like)


def check_device(name: str, part, like: Tensor):
    """part: a Tensor, a Routing or an MXTensor."""
    if part.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like the other arguments, got {part.device}")


def check_shape(name: str, t: Tensor, shape: tuple[int, ...]):
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(t.shape)}")


def check_choice(name: str, value, choices):
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_out(name: str, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor):
    """A contiguous output buffer of exactly this shape and dtype."""
    check_tensor(name, out, len(shape), (dtype,), like)
    check_shape(name, out, shape)
    if not out.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tuple(out.stride())} for shape {tuple(out.shape)}")


def check_offs(offs: Tensor, like: Tensor, num_groups: int | None = None) -> Tensor:
    """int32 cumulative end offsets (E,), made contiguous; their values are checked by check_offs_values where they can be read."""
    check_tensor("offs", offs, 1, (torch.int32,), like)
    if num_groups is not None and offs.shape[0] != num_groups:
        raise ValueError(f"offs must have one entry per group ({num_groups}), got {offs.shape[0]}")
    if offs.shape[0] == 0:
        raise ValueError("offs must have at least one group, got shape (0,)")
    return offs.contiguous()


def check_index_values(name: str, index: Tensor, bound: int):
    """Indices below `bound`; negative ones mean none. Read on the CPU only: a GPU path never synchronises."""
    if index.device.type == "cpu" and index.numel() and (largest := int(index.max())) >= bound:
        raise ValueError(f"{name} must hold indices below {bound}, got {largest}")


def check_offs_values(offs: Tensor | None, num_rows: int):
    """Ends must not decrease, start at >= 0 and end within the rows. Read on the CPU only: a GPU path never synchronises."""
    if offs is None or offs.device.type != "cpu":
        return
    ends = offs.tolist()
    previous = 0
    for group, end in enumerate(ends):
        if end < previous:
            bound = "0" if group == 0 else f"offs[{group - 1}] = {previous}"
            raise ValueError(f"offs must be non-negative and non-decreasing: offs[{group}] must be >= {bound}, got {end}")
        previous = end
    if previous > num_rows:
        raise ValueError(f"offs must end within the {num_rows} rows, got offs[-1] = {previous}")
