"""moe_decode by the other verbs: the layer's own bytes, whatever the number of tokens."""

from functools import partial
from types import SimpleNamespace

from mxmoe.backends import moe_decode as composed
from mxmoe.backends.triton.kernels.grouped_mm import grouped_mm
from mxmoe.backends.triton.kernels.permute import permute
from mxmoe.backends.triton.kernels.quantize import quantize
from mxmoe.backends.triton.kernels.sort_by_expert import sort_by_expert
from mxmoe.backends.triton.kernels.swiglu import swiglu
from mxmoe.backends.triton.kernels.target import Target
from mxmoe.backends.triton.kernels.unpermute import unpermute

USED = (sort_by_expert, permute, quantize, grouped_mm, swiglu, unpermute)


def moe_decode(on: Target, *arguments):
    composed.compose(SimpleNamespace(**{verb.__name__: partial(verb, on) for verb in USED}), *arguments)
