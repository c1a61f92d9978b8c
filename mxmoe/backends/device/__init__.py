"""The verbs over GPU kernels: the same for a GPU (backend `cuda`) and for the interpreter of these kernels (`interpreter`).

Each function is a verb of the contract (mxmoe/backends) that takes, before the verb's arguments, the `Launcher` which runs a kernel
of csrc/cuda by its name. It brings operands into the form that kernels take (rows as TMA reads them, scales in the blocked layout)
without ever reading a tensor's values on the host, so that a GPU is not waited for and a CUDA graph can record it.

A new verb is a line of VERBS.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from mxmoe.backends.device.decode import FORMATS as DECODED
from mxmoe.backends.device.decode import moe_decode
from mxmoe.backends.device.gemm import grouped_mm, grouped_mm_wgrad
from mxmoe.backends.device.memory import empty
from mxmoe.backends.device.quantize import dequantize, quantize, swizzle_scales
from mxmoe.backends.device.route import route, route_backward, sort_by_expert
from mxmoe.backends.device.rows import permute, swiglu, swiglu_backward, unpermute, unpermute_backward

HIGH_PRECISION = ("fp32", "bf16", "fp16")
MX8 = ("mxfp8", "mxfp8_e5m2")
SCALED = (*MX8, "mxfp4", "nvfp4")
VERBS = {
    quantize: SCALED,
    dequantize: SCALED,
    swizzle_scales: SCALED,
    route: ("fp32",),
    route_backward: ("fp32",),
    sort_by_expert: ("int32",),
    permute: HIGH_PRECISION,
    unpermute: HIGH_PRECISION,
    unpermute_backward: HIGH_PRECISION,
    swiglu: HIGH_PRECISION,
    swiglu_backward: HIGH_PRECISION,
    grouped_mm: (*HIGH_PRECISION, *MX8, "nvfp4"),
    grouped_mm_wgrad: (*HIGH_PRECISION, *MX8, "nvfp4"),
    moe_decode: DECODED,
}  # -> formats, on one architecture at least
SUPPORTS: frozenset[tuple[str, str]] = frozenset((verb.__name__, format) for verb, formats in VERBS.items() for format in formats)


@dataclass(frozen=True)
class Launcher:
    """Who runs kernels."""

    name: str  # of the backend
    arch: Callable[[torch.device], str]  # whose kernels run for tensors there: "sm_90" | "sm_100"; NotImplementedError: nobody's
    launch: Callable[..., None]  # launch(kernel, *arguments) as csrc/cuda/verbs.h lists them


def verbs(on: Launcher) -> dict[str, Callable]:
    """The functions of a backend module, `empty` included."""
    return {verb.__name__: partial(verb, on) for verb in VERBS} | {"empty": empty}
