"""Registration of the verbs as torch ops, so that they trace and compile.

Every verb is `torch.ops.mxmoe.<verb>`: plain tensors in, preallocated tensors filled, nothing returned. Such an op needs no
shape function, and torch.compile functionalises it by itself. The layer's differentiable ops are in `mxmoe/autograd.py`.
"""

from functools import wraps

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled, forward_ad
from torch.compiler import is_dynamo_compiling

from mxmoe import backends
from mxmoe.formats import HIGH_PRECISION

LIBRARY = torch.library.Library("mxmoe", "DEF")
OPS = torch.ops.mxmoe
_NUM_INTERCEPTORS = getattr(torch._C, "_len_torch_dispatch_stack", None)  # private: where it is missing, nothing goes past


def fill_op(schema: str):
    """Registers a function that fills its `Tensor(x!)` arguments and returns nothing; it is not differentiable.

    ValueError where one that is filled overlaps another argument: rows would be read after they are written.
    """

    def register(function):
        name = schema.split("(")[0]
        LIBRARY.define(f"{schema} -> ()")
        arguments = getattr(OPS, name).default._schema.arguments
        filled = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None)

        @torch.no_grad()
        @wraps(function)
        def checked(*args):
            for i in filled:
                if args[i] is not None:
                    start, end = _range(args[i])
                    for j, t in enumerate(args):
                        if isinstance(t, Tensor) and i != j and t.data_ptr() < end and start < _range(t)[1]:
                            raise ValueError(
                                f"{arguments[i].name} must not overlap {arguments[j].name} in memory, got tensors that do"
                            )
            function(*args)

        LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mxmoe::{name}", lambda *args, **kwargs: None, lib=LIBRARY)
        return function

    return register


def unobserved() -> bool:
    """Whether a verb on plain tensors may go past torch's dispatcher: nobody traces, intercepts or profiles ops."""
    return _NUM_INTERCEPTORS is not None and not (is_dynamo_compiling() or _NUM_INTERCEPTORS() or _profiler_enabled())


def _range(t: Tensor) -> tuple[int, int]:
    """Addresses of the first element and past the last; the same where there is none."""
    start = t.data_ptr()
    if t.is_contiguous():
        return start, start + t.nbytes
    return start, start + t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))


def once_differentiable(backward):
    """The backward of an op, refused where its result is to be differentiated again: it would count as a constant."""

    @wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled():
            raise NotImplementedError("mxmoe has first derivatives only: create_graph=True (double backward) is not supported")
        return backward(ctx, *grads)

    return checked


def refuse_forward_mode(*tensors: Tensor | None):
    """torch drops the tangents of an op that has only a backward, so that they would count as zero."""
    if torch.compiler.is_compiling():
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("mxmoe has no forward-mode derivatives (jvp): use backward")


def backend_for(name: str, like: Tensor, verb: str, format: str) -> str:
    """The name of the backend of `like`'s device, after checking that it has this verb for this format."""
    return _backend_with(name, like.device.type, verb, format)


@torch.compiler.assume_constant_result
def _backend_with(name: str, device_type: str, verb: str, format: str) -> str:
    names = backends.candidates(name, device_type)
    for resolved in names:
        if (verb, format) in backends.get(resolved).SUPPORTS:
            return resolved
    raise NotImplementedError(f"backend {names[0]!r} has no {verb} for format {format!r}")


def dtype_format(t: Tensor) -> str:
    """ "fp32", "bf16" or "fp16"."""
    return HIGH_PRECISION[t.dtype]
