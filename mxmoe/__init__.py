"""mxmoe: low-precision Mixture-of-Experts compute (MXFP8, NVFP4), the same bytes on every backend. Start at `moe_layer`."""

from mxmoe import ops
from mxmoe.casts import decode, encode
from mxmoe.formats import MXTensor
from mxmoe.layer import PreparedExperts, moe_experts, moe_layer, prepare_experts
from mxmoe.linear import linear
from mxmoe.memory import MemoryStats, empty_cache, memory_stats
from mxmoe.module import MoE
from mxmoe.ops import (
    dequantize,
    grouped_mm,
    grouped_mm_wgrad,
    permute,
    quantize,
    route,
    swiglu,
    swizzle_scales,
    to_panels,
    unpermute,
)
from mxmoe.recipes import Recipe, SwiGLU
from mxmoe.routing import Routing, update_selection_bias_
from mxmoe.storage import load_mxtensors, save_mxtensors

__version__ = "0.1.0"
__all__ = [
    "MXTensor",
    "MemoryStats",
    "MoE",
    "PreparedExperts",
    "Recipe",
    "Routing",
    "SwiGLU",
    "decode",
    "dequantize",
    "empty_cache",
    "encode",
    "grouped_mm",
    "grouped_mm_wgrad",
    "linear",
    "load_mxtensors",
    "memory_stats",
    "moe_experts",
    "moe_layer",
    "ops",
    "permute",
    "prepare_experts",
    "quantize",
    "route",
    "save_mxtensors",
    "swiglu",
    "swizzle_scales",
    "to_panels",
    "unpermute",
    "update_selection_bias_",
]
