"""quantize by csrc/cuda/kernels/quantize.h and quantize_nvfp4.h."""

import torch.nn.functional as F

from mxmoe.backends.device.memory import for_tma
from mxmoe.formats import QuantizeOptions


def quantize(on, x_BRL, offs_E, format, options: QuantizeOptions, row, column):
    run(on, x_BRL, offs_E, format, options, row, column, blocked=False)


def run(on, x_BRL, offs_E, format, options: QuantizeOptions, row, column, blocked: bool):
    """As `quantize`; blocked: scales are uint8 in the layout that swizzle_scales makes, (B, bytes) or (bytes,)."""
    for name in ("seed", "hadamard", "four_six", "block_2d"):
        if getattr(options, name) not in (None, False):
            raise NotImplementedError(f"the {on.name} backend has no quantize with option {name}")
    if format == "nvfp4":
        if options.scope != "row":
            raise NotImplementedError(f"the {on.name} backend quantizes to nvfp4 with scope 'row', got {options.scope!r}")
        padded = F.pad(x_BRL, (0, -x_BRL.shape[-1] % 8)).contiguous()
        on.launch("quantize_nvfp4", padded, offs_E, blocked, *row)
        return
    copies = [field for copy in (row, column) for field in (copy or (None, None, None))[:2]]
    on.launch("quantize", for_tma(x_BRL), offs_E, format, options.scale_mode == "floor", blocked, *copies)
