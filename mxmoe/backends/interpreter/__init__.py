"""The GPU kernels on the CPU: csrc/cuda/kernels run by csrc/interpreter, which checks every access and every barrier.

For tests, not for speed. A kernel that races, deadlocks, or reads what it may not raises `KernelError`.
"""

from mxmoe.backends.interpreter.extension import KernelError, Run, running
from mxmoe.backends.interpreter.gemm import grouped_mm, grouped_mm_wgrad
from mxmoe.backends.interpreter.memory import empty
from mxmoe.backends.interpreter.quantize import quantize
from mxmoe.backends.interpreter.rows import permute, swiglu, swiglu_backward, unpermute, unpermute_backward

_ROWS = ("permute", "unpermute", "unpermute_backward", "swiglu", "swiglu_backward")

SUPPORTS: frozenset[tuple[str, str]] = frozenset(
    {("quantize", format) for format in ("mxfp8", "mxfp8_e5m2", "nvfp4")}
    | {(verb, format) for verb in _ROWS for format in ("fp32", "bf16", "fp16")}
    | {("grouped_mm", format) for format in ("bf16", "fp16", "mxfp8", "mxfp8_e5m2", "nvfp4")}
    | {("grouped_mm_wgrad", format) for format in ("bf16", "fp16", "mxfp8", "mxfp8_e5m2")}
)  # (verb, format)

__all__ = [
    "SUPPORTS",
    "KernelError",
    "Run",
    "empty",
    "grouped_mm",
    "grouped_mm_wgrad",
    "permute",
    "quantize",
    "running",
    "swiglu",
    "swiglu_backward",
    "unpermute",
    "unpermute_backward",
]
