"""quantize, dequantize and swizzle_scales, by csrc/cuda/kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mxmoe.backends.device.memory import dense, for_tma
from mxmoe.formats import QuantizeOptions

FAST = ("mxfp8", "mxfp8_e5m2", "nvfp4")  # row, column or both copies in one pass; of NVFP4 row copies with scope "row"


def quantize(on, x_BRL, offs_E, format, options: QuantizeOptions, row, column):
    plain = options.seed is None and not (options.hadamard or options.four_six or options.block_2d)
    if plain and format in FAST and (format != "nvfp4" or options.scope == "row"):
        run(on, x_BRL, offs_E, format, options, row, column, blocked=False)
        return
    x = _stacked(x_BRL)
    for copy, axis in ((row, "row"), (column, "column")):
        if copy is not None:
            values, scales, global_scale = copy
            on.launch(
                "quantize_blocks", x, offs_E, format, options.scale_mode == "floor", options.scope, options.seed,
                options.hadamard, options.four_six, options.block_2d, axis == "column",
                int(axis == "column" and not options.block_2d),  # tiles have one random word for both copies
                values, scales, global_scale,
            )  # fmt: skip


def run(on, x_BRL, offs_E, format, options: QuantizeOptions, row, column, blocked: bool):
    """Without options and in a FAST format; blocked: scales are uint8 in the layout that swizzle_scales makes, (B, bytes) or
    (bytes,)."""
    if format == "nvfp4":
        padded = F.pad(x_BRL, (0, -x_BRL.shape[-1] % 8)).contiguous()
        on.launch("quantize_nvfp4", padded, offs_E, blocked, *row)
        return
    copies = [field for copy in (row, column) for field in (copy or (None, None, None))[:2]]
    if x_BRL.numel() == 0:  # all that is written is padding
        for t in copies:
            if t is not None:
                t.view(torch.uint8).zero_()
        return
    on.launch("quantize", for_tma(x_BRL), offs_E, format, options.scale_mode == "floor", blocked, *copies)


def dequantize(on, values, scales, global_scale, offs_E, format, axis, scope, out_BRL):
    if out_BRL.numel() == 0:
        return
    with dense(out_BRL) as out:
        to = out if _stacked(out) is out else torch.empty_like(out, memory_format=torch.contiguous_format)
        on.launch("dequantize", values, scales, global_scale, offs_E, format, axis == "column", scope, to)
        if to is not out:
            out.copy_(to)


def swizzle_scales(on, plain, blocked, offs_E, axis, block, inverse):
    if not inverse:
        blocked.zero_()
    on.launch("swizzle_scales", plain.contiguous(), blocked, offs_E, axis == "column", block, inverse)


def _stacked(x_BRL: Tensor) -> Tensor:
    """Itself where rows have unit stride and matrices are R rows apart, else a contiguous copy."""
    regular = x_BRL.stride(2) == 1 and (x_BRL.shape[0] == 1 or x_BRL.stride(0) == x_BRL.shape[1] * x_BRL.stride(1))
    return x_BRL if regular else x_BRL.contiguous()
