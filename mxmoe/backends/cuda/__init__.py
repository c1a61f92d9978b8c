"""The GPU kernels on GPUs: csrc/cuda on the current stream of the tensors' device. The verbs are those of mxmoe/backends/device.

Nothing waits for the device and nothing is read from it; outputs and workspaces come from torch's allocator, so that a CUDA graph
records a verb like any torch operator. The module imports where there is no GPU; a verb then says what it needs.
"""

from mxmoe.backends.cuda.extension import LAUNCHER, arch_of, lacks, module
from mxmoe.backends.device import SUPPORTS, verbs

globals().update(verbs(LAUNCHER))

__all__ = ["LAUNCHER", "SUPPORTS", "arch_of", "lacks", "module"]
