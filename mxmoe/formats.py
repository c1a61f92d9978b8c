"""Number formats and `MXTensor`, the carrier of a quantized matrix.

A block-scaled format stores small elements (E4M3, E5M2, E2M1) in blocks of 32 or 16 that share one scale: MX formats (OCP
Microscaling v1.0) a power of two (E8M0), NVFP4 an E4M3 number times one FP32 global scale. docs/numerics.md has every bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """Facts of one format."""

    name: str
    element: str  # "e4m3" | "e5m2" | "e2m1"
    block: int  # elements that share a scale
    max: float  # largest element
    bits: int  # of an element
    values_dtype: torch.dtype
    scales_dtype: torch.dtype
    has_global_scale: bool = False

    @property
    def scale_element(self) -> str:
        """Name of the block scale's own format."""
        return "e4m3" if self.has_global_scale else "e8m0"


FORMATS = {
    f.name: f
    for f in (
        Format("mxfp8", "e4m3", 32, 448.0, 8, torch.float8_e4m3fn, torch.float8_e8m0fnu),
        Format("mxfp8_e5m2", "e5m2", 32, 57344.0, 8, torch.float8_e5m2, torch.float8_e8m0fnu),
        Format("mxfp4", "e2m1", 32, 6.0, 4, torch.uint8, torch.float8_e8m0fnu),
        Format("nvfp4", "e2m1", 16, 6.0, 4, torch.uint8, torch.float8_e4m3fn, has_global_scale=True),
    )
}
HADAMARD_SIGNS = 0x5C2B  # bit j set: element j of 16 is negated before the butterflies
HIGH_PRECISION = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize; the defaults are the contract's. See `mxmoe.quantize`."""

    scale_mode: str = "rceil"  # "rceil" | "floor" (MX formats)
    scope: str = "row"  # of the NVFP4 global scale: "row" | "tensor" | "group"
    seed: int | None = None  # stochastic rounding where not None: 64-bit Philox key
    hadamard: bool = False
    four_six: bool = False
    block_2d: bool = False


@dataclass(frozen=True)
class MXTensor:
    """A matrix (or a stack of them) in a block-scaled format. (Worked example to be written.)"""

    values: Tensor
    scales: Tensor
    global_scale: Tensor | None
    format: str
    axis: str  # "row": blocks along the last axis; "column": along the second to last
    shape: tuple[int, ...]  # logical shape of the source
    scope: str = "row"  # of global_scale
    scale_layout: str = "plain"  # "plain" (line, block) | "blocked" (docs/layouts.md)
    offs: Tensor | None = field(default=None)  # groups the copy was made with

    @property
    def device(self) -> torch.device:
        return self.values.device
