"""The verbs by name, each on the target of its tensors' device."""

from torch import Tensor
from torch.utils._pytree import tree_leaves

from mxmoe.backends.triton.kernels.dequantize import dequantize
from mxmoe.backends.triton.kernels.grouped_mm import grouped_mm
from mxmoe.backends.triton.kernels.grouped_mm_wgrad import grouped_mm_wgrad
from mxmoe.backends.triton.kernels.moe_decode import moe_decode
from mxmoe.backends.triton.kernels.permute import permute
from mxmoe.backends.triton.kernels.quantize import quantize
from mxmoe.backends.triton.kernels.route import route
from mxmoe.backends.triton.kernels.route_backward import route_backward
from mxmoe.backends.triton.kernels.sort_by_expert import sort_by_expert
from mxmoe.backends.triton.kernels.swiglu import swiglu, swiglu_backward
from mxmoe.backends.triton.kernels.swizzle_scales import swizzle_scales
from mxmoe.backends.triton.kernels.target import target_of
from mxmoe.backends.triton.kernels.unpermute import unpermute, unpermute_backward

VERBS = {
    verb.__name__: verb
    for verb in (
        quantize, dequantize, swizzle_scales, route, route_backward, sort_by_expert, permute, unpermute, unpermute_backward, swiglu,
        swiglu_backward, grouped_mm, grouped_mm_wgrad, moe_decode,
    )
}  # fmt: skip


def run(name: str, *args):
    device = next(leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
    VERBS[name](target_of(device), *args)
