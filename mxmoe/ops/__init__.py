"""The verbs: what each computes, its checks, and the call of the backend that does it.

Shape letters: T tokens, D model width, F expert width, G = 2F, E experts, K top-k, N = T * K routed rows; a bare GEMM is
(M, O, C): rows, outputs, contraction. `offs` is int32 (E,): cumulative end offsets of the groups of rows; empty groups, any
sizes and zero rows are legal, rows past offs[-1] are never read and come out as zero. Every verb takes `backend="auto"` (the
fast backend of the tensor's device; a name never falls back) and, where it makes one tensor, `out=` to fill, which overlaps no
argument. The bits are defined in docs/numerics.md. Verbs are not differentiable, except route; `moe_layer`, `moe_experts` and
`linear` are, once, in reverse mode.
"""

from mxmoe.ops.decode import moe_decode
from mxmoe.ops.gemm import grouped_mm, grouped_mm_wgrad
from mxmoe.ops.quantize import dequantize, plain_scales, quantize, swizzle_scales, to_panels
from mxmoe.ops.route import route, route_backward, sort_by_expert
from mxmoe.ops.rows import permute, swiglu, swiglu_backward, unpermute, unpermute_backward

__all__ = [
    "dequantize",
    "grouped_mm",
    "grouped_mm_wgrad",
    "moe_decode",
    "permute",
    "plain_scales",
    "quantize",
    "route",
    "route_backward",
    "sort_by_expert",
    "swiglu",
    "swiglu_backward",
    "swizzle_scales",
    "to_panels",
    "unpermute",
    "unpermute_backward",
]
