"""Loads the compiled core and holds what every host verb passes to it: the instruction set and the thread count."""

import importlib.util
from contextlib import contextmanager
from contextvars import ContextVar

import torch

try:
    import mxmoe._C as _C
except ImportError as error:  # named again, with what to do, where a verb is asked for
    spec = importlib.util.find_spec("mxmoe._C")
    raise ImportError(
        f"the host backend needs the compiled core mxmoe._C ({spec.origin if spec else 'not built'}), which failed to load: "
        f"{error}. Build it with `pip install -e .`, or ask for backend='reference'."
    ) from error

_isa = ContextVar("mxmoe_isa", default="auto")


@contextmanager
def use_isa(name: str):
    """Run host verbs with this instruction set ("portable", "avx2", "avx512"); for tests and measurements."""
    if name not in _C.isas():
        raise ValueError(f"isa must be one of {', '.join(_C.isas())} on this CPU, got {name!r}")
    token = _isa.set(name)
    try:
        yield
    finally:
        _isa.reset(token)


def execution() -> tuple[str, int]:
    """(isa, threads): the last two arguments of every binding."""
    return _isa.get(), torch.get_num_threads()
