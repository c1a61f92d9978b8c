"""quantize by csrc/cuda/kernels/quantize.h."""

from mxmoe.backends.interpreter.extension import launch
from mxmoe.backends.interpreter.memory import for_tma
from mxmoe.formats import QuantizeOptions


def quantize(x_BRL, offs_E, format, options: QuantizeOptions, row, column):
    run(x_BRL, offs_E, format, options, row, column, blocked=False)


def run(x_BRL, offs_E, format, options: QuantizeOptions, row, column, blocked: bool):
    """As `quantize`; blocked: scales are uint8 in the layout that swizzle_scales makes, (B, bytes) or (bytes,)."""
    for name in ("seed", "hadamard", "block_2d"):
        if getattr(options, name) not in (None, False):
            raise NotImplementedError(f"the interpreter backend has no quantize with option {name}")
    copies = [field for copy in (row, column) for field in (copy or (None, None, None))[:2]]
    launch("quantize", for_tma(x_BRL), offs_E, format, options.scale_mode == "floor", blocked, *copies)
