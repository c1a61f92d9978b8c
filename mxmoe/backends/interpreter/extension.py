"""Loads the interpreter and holds what every run is given: the scheduler's seed, CTAs at a time, and one mutant."""

import importlib.util
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from mxmoe.backends.device import Launcher
from mxmoe.checks import check_choice

try:
    import mxmoe._interp as _interp
except ImportError as error:  # named again, with what to do, where a verb is asked for
    spec = importlib.util.find_spec("mxmoe._interp")
    raise ImportError(
        f"the interpreter backend needs mxmoe._interp ({spec.origin if spec else 'not built'}), which failed to load: {error}. "
        "Build it with `pip install -e .`, or ask for backend='host'."
    ) from error

KernelError = _interp.KernelError


@dataclass
class Run:
    """How kernels run, and what ran."""

    seed: int = 0
    arch: str = "sm_100"  # whose kernels: "sm_100" | "sm_90"
    num_sms: int = 2  # CTAs at the same time
    site: str = ""  # label of the one call that is done wrongly,
    mutant: str = ""  # and how: "skip", "parity", ... (csrc/interpreter/machine.h)
    program: object = None  # `_interp.Program`: kernels are added to it and run when it does
    sites: list[tuple[str, str, int, list[str]]] = field(default_factory=list)  # label, instruction, calls, kinds of mutants

    def __post_init__(self):
        check_choice("arch", self.arch, ("sm_90", "sm_100"))
        for name, least, end in (("seed", 0, 2**64), ("num_sms", 1, 2**31)):
            if not least <= (value := getattr(self, name)) < end:
                raise ValueError(f"{name} must be at least {least} and below {end}, got {value}")


_run = ContextVar("mxmoe_interpreter_run", default=None)


@contextmanager
def running(**settings):
    """Kernels inside run with these settings of `Run`, which is yielded; the others are those around it, `sites` included."""
    run = replace(_run.get() or Run(), **settings)
    token = _run.set(run)
    try:
        yield run
    finally:
        _run.reset(token)


def arch(_device) -> str:
    return (_run.get() or Run()).arch


def launch(name: str, *args):
    """Runs a kernel; raises KernelError where it is wrong."""
    run = _run.get() or Run()
    run.sites += getattr(_interp, name)(*args, run.seed, run.num_sms, run.site, run.mutant, run.program)


LAUNCHER = Launcher("interpreter", arch, launch)
