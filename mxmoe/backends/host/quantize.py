"""quantize, dequantize and swizzle_scales on the CPU; the contract is in mxmoe/backends. And what only checkpoints hold: INT4."""

from mxmoe import _C
from mxmoe.backends.host.extension import execution


def quantize(x_BRL, offs_E, format, options, row, column):
    none = (None, None, None)
    _C.quantize(
        x_BRL, offs_E, format, options.scale_mode == "floor", options.scope, options.seed, options.hadamard,
        options.four_six, options.block_2d, *(row or none), *(column or none), *execution(),
    )  # fmt: skip


def dequantize(values, scales, global_scale, offs_E, format, axis, scope, out_BRL):
    _C.dequantize(values, scales, global_scale, offs_E, format, axis == "column", scope, out_BRL, *execution())


def swizzle_scales(plain, blocked, offs_E, axis, block, inverse):
    _C.swizzle_scales(plain, blocked, offs_E, axis == "column", block, inverse, *execution())


def decode_int4(packed, scale, out):
    """packed uint8 (R, C/2), scale FP32, BF16 or FP16 (R, C/32) -> out FP32, BF16 or FP16 (R, C); all contiguous."""
    _C.decode_int4(packed, scale, out, *execution())
