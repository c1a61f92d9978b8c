"""The interpreters' cases on a GPU: the verbs of the backends `interpreter` and `triton` are replaced by those of `cuda` and
`triton` on copies of their arguments, so that inputs, references and bounds are the same text."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mxmoe.backends import cuda, device, interpreter, triton
from mxmoe.backends.device.quantize import run as run_quantize
from tests import conformance, interpreter_cases, triton_cases


def mirrored(verb: Callable, to: torch.device) -> Callable:
    """`verb` as it is called on CPU tensors: run on copies of their whole storages on `to` (so that strides, offsets and overlaps
    stay), which are then copied back, also where it raises."""

    def call(*args):
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def there(t):
            if not isinstance(t, Tensor):
                return t
            storage = t.untyped_storage()
            key = storage.data_ptr() if t.numel() else id(t)
            if key not in copies:
                here = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
                copies[key] = here, here.to(to, copy=True)
            return torch.empty(0, dtype=t.dtype, device=to).set_(
                copies[key][1].untyped_storage(), t.storage_offset(), t.shape, t.stride()
            )

        try:
            verb(*tree_map(there, args))
        finally:
            for here, copy in copies.values():
                here.copy_(copy)

    return call


@contextmanager
def replaced(module, values: dict[str, object]):
    """Within, the module's names have these values."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def kernels_on(to: torch.device, verbs: dict[str, Callable], launcher: device.Launcher):
    """Within, backend="interpreter" on CPU tensors runs `verbs` on `to`."""
    quantize = mirrored(partial(run_quantize, launcher), to)
    verbs = {name: mirrored(verb, to) for name, verb in verbs.items() if name != "empty"}
    run = {"run_quantize": lambda _, *args, blocked: quantize(*args, blocked)}
    with replaced(interpreter, verbs), replaced(interpreter_cases, run):
        yield


@contextmanager
def triton_on(to: torch.device):
    """Within, backend="triton" on CPU tensors runs on `to`, and its cases are those of the interpreter's file."""
    verbs = {name: mirrored(getattr(triton, name), to) for name in triton.VERBS}
    with replaced(triton, verbs), replaced(interpreter_cases, {"INTERPRETER": triton_cases.TRITON}):
        yield


def jobs(arch: str) -> dict[str, Callable[[], dict]]:
    """The cases of this architecture."""
    others = tuple(other for other in conformance.ARCHS if other != arch)
    return {name: partial(equal, case) for name, case in conformance.table().items() if not name.endswith(others)}


def equal(case: Callable[[], None]) -> dict:
    to = torch.device("cuda", torch.cuda.current_device())
    with kernels_on(to, device.verbs(cuda.LAUNCHER), cuda.LAUNCHER):
        case()
    return {"outcome": "equal"}


def triton_jobs() -> dict[str, Callable[[], dict]]:
    """The cases of the backend `triton`."""
    return {name: partial(triton_equal, case) for name, case in triton_cases.table().items()}


def triton_equal(case: Callable[[], None]) -> dict:
    with triton_on(torch.device("cuda", torch.cuda.current_device())):
        case()
    return {"outcome": "equal"}
