"""The portable GPU kernels, in Triton: every verb but dispatch and combine, on any GPU that Triton compiles for.

Every byte the contract promises is the reference's: the kernels compute as docs/numerics.md says and are tested in Triton's
interpreter (TRITON_INTERPRET=1 before the first verb). A kernel is compiled when it is first launched; nothing waits for the device
and nothing is read from it. The module imports without Triton; a verb then says what it needs.
"""

from functools import cache
from types import ModuleType

import torch

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
VERBS = sorted({verb for verb, _ in SUPPORTS})


@cache
def loaded() -> ModuleType:
    """The kernels; ImportError with what is missing."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the triton backend needs Triton, which failed to import: {error}. It comes with torch for CUDA; else: "
            "pip install 'mxmoe[gpu]'"
        ) from error
    from mxmoe.backends.triton import kernels

    return kernels


def _verb(name: str):
    def run(*args):
        return loaded().run(name, *args)

    return run


globals().update({name: _verb(name) for name in VERBS})


def empty(shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
