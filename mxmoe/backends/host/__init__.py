"""The fast CPU backend: thin calls into the compiled core (csrc/host)."""

from mxmoe.backends.host.extension import use_isa
from mxmoe.backends.host.route import route, route_backward, sort_by_expert
from mxmoe.backends.host.rows import permute, swiglu, swiglu_backward, unpermute, unpermute_backward

_ROWS = ("permute", "unpermute", "unpermute_backward", "swiglu", "swiglu_backward")

SUPPORTS: frozenset[tuple[str, str]] = frozenset(
    {("route", "fp32"), ("route_backward", "fp32"), ("sort_by_expert", "int32")}
    | {(verb, format) for verb in _ROWS for format in ("fp32", "bf16", "fp16")}
)  # (verb, format)

__all__ = [
    "SUPPORTS",
    "permute",
    "route",
    "route_backward",
    "sort_by_expert",
    "swiglu",
    "swiglu_backward",
    "unpermute",
    "unpermute_backward",
    "use_isa",
]
