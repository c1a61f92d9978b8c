"""The GPU kernels on the CPU: csrc/cuda/kernels run by csrc/interpreter, which checks every access and every barrier.

For tests, not for speed. A kernel that races, deadlocks, or reads what it may not raises `KernelError`. The verbs are those of
mxmoe/backends/device.
"""

from mxmoe.backends.device import SUPPORTS, verbs
from mxmoe.backends.interpreter.extension import LAUNCHER, KernelError, Run, running

globals().update(verbs(LAUNCHER))

__all__ = ["LAUNCHER", "SUPPORTS", "KernelError", "Run", "running"]
