"""The definition: every verb in plain PyTorch, written for reading, run on any device."""

import sys
from functools import partial

import torch

from mxmoe.backends.moe_decode import compose
from mxmoe.backends.reference.gemm import grouped_mm, grouped_mm_wgrad
from mxmoe.backends.reference.quantize import dequantize, quantize
from mxmoe.backends.reference.route import route, route_backward, sort_by_expert
from mxmoe.backends.reference.rows import permute, swiglu, swiglu_backward, unpermute, unpermute_backward
from mxmoe.backends.reference.swizzle import swizzle_scales
from mxmoe.formats import FORMATS

_QUANTIZE = ("quantize", "dequantize", "swizzle_scales")
_GEMMS = ("grouped_mm", "grouped_mm_wgrad", "moe_decode")
_ROWS = ("permute", "unpermute", "unpermute_backward", "swiglu", "swiglu_backward")

SUPPORTS: frozenset[tuple[str, str]] = frozenset(
    {("route", "fp32"), ("route_backward", "fp32"), ("sort_by_expert", "int32")}
    | {(verb, format) for verb in _GEMMS for format in ("fp32", "bf16", "fp16", *FORMATS)}
    | {(verb, format) for verb in _ROWS for format in ("fp32", "bf16", "fp16")}
    | {(verb, format) for verb in _QUANTIZE for format in FORMATS}
)  # (verb, format)

moe_decode = partial(compose, sys.modules[__name__])


def empty(shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


__all__ = [
    "SUPPORTS",
    "dequantize",
    "empty",
    "grouped_mm",
    "grouped_mm_wgrad",
    "moe_decode",
    "permute",
    "quantize",
    "route",
    "route_backward",
    "sort_by_expert",
    "swiglu",
    "swiglu_backward",
    "swizzle_scales",
    "unpermute",
    "unpermute_backward",
]
