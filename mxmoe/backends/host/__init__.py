"""The fast CPU backend: thin calls into the compiled core (csrc/host)."""

from mxmoe.backends.host.extension import use_isa
from mxmoe.backends.host.gemm import checked_decode, grouped_mm, grouped_mm_wgrad, moe_decode
from mxmoe.backends.host.memory import empty, empty_cache, memory_stats
from mxmoe.backends.host.quantize import decode_int4, dequantize, quantize, swizzle_scales
from mxmoe.backends.host.route import route, route_backward, sort_by_expert
from mxmoe.backends.host.rows import permute, swiglu, swiglu_backward, unpermute, unpermute_backward
from mxmoe.formats import FORMATS

_GEMMS = ("grouped_mm", "grouped_mm_wgrad", "moe_decode")
_QUANTIZE = ("quantize", "dequantize", "swizzle_scales")
_ROWS = ("permute", "unpermute", "unpermute_backward", "swiglu", "swiglu_backward")

SUPPORTS: frozenset[tuple[str, str]] = frozenset(
    {("route", "fp32"), ("route_backward", "fp32"), ("sort_by_expert", "int32")}
    | {(verb, format) for verb in _GEMMS for format in ("fp32", "bf16", "fp16", *FORMATS)}
    | {(verb, format) for verb in _ROWS for format in ("fp32", "bf16", "fp16")}
    | {(verb, format) for verb in _QUANTIZE for format in FORMATS}
)  # (verb, format)

__all__ = [
    "SUPPORTS",
    "checked_decode",
    "decode_int4",
    "dequantize",
    "empty",
    "empty_cache",
    "grouped_mm",
    "grouped_mm_wgrad",
    "memory_stats",
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
    "use_isa",
]
