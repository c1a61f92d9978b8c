"""Registration of the verbs as torch ops, so that they trace and compile.

Every verb is `torch.ops.mxmoe.<verb>`: plain tensors in, preallocated tensors filled, nothing returned. Such an op needs no
shape function, and torch.compile functionalises it by itself. The layer's differentiable ops are in `mxmoe/autograd.py`.
"""

import torch
from torch import Tensor

from mxmoe import backends
from mxmoe.formats import HIGH_PRECISION

LIBRARY = torch.library.Library("mxmoe", "DEF")
OPS = torch.ops.mxmoe


def fill_op(schema: str):
    """Registers a function that fills its `Tensor(x!)` arguments and returns nothing; it is not differentiable."""

    def register(function):
        name = schema.split("(")[0]
        LIBRARY.define(f"{schema} -> ()")
        LIBRARY.impl(name, torch.no_grad()(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"mxmoe::{name}", lambda *args, **kwargs: None, lib=LIBRARY)
        return function

    return register


def backend_for(name: str, like: Tensor, verb: str, format: str) -> str:
    """The name of the backend of `like`'s device, after checking that it has this verb for this format."""
    return _backend_with(name, like.device.type, verb, format)


@torch.compiler.assume_constant_result
def _backend_with(name: str, device_type: str, verb: str, format: str) -> str:
    resolved = backends.resolve(name, device_type)
    if (verb, format) not in backends.get(resolved).SUPPORTS:
        raise NotImplementedError(f"backend {resolved!r} has no {verb} for format {format!r}")
    return resolved


def dtype_format(t: Tensor) -> str:
    """ "fp32", "bf16" or "fp16"."""
    return HIGH_PRECISION[t.dtype]
