"""grouped_mm and grouped_mm_wgrad: the product of the dequantized values, one group at a time, in FP32.

The NVFP4 global scale is applied to the product, once per output row and once per output column.
"""

import torch
from torch import Tensor

from mxmoe import layout
from mxmoe.backends.reference.blocks import unpack_fp4
from mxmoe.casts import decode
from mxmoe.formats import FORMATS


def grouped_mm(a, b, offs_E, bias_EO, out_MO):
    contraction = min(logical_contraction(a), logical_contraction(b))
    start = 0
    for e, end in enumerate(offs_E.tolist()):
        rows, weight = group(a, slice(start, end), slice(0, contraction)), expert(b, e, contraction)
        y = product(rows, weight)
        out_MO[start:end] = y if bias_EO is None else y + bias_EO[e].float()
        start = end
    out_MO[start:] = 0


def grouped_mm_wgrad(a, b, offs_E, padded, accumulate, out_EOC):
    starts = layout.padded_starts(offs_E) if padded else torch.cat((offs_E.new_zeros(1), offs_E[:-1]))
    sizes = torch.diff(offs_E, prepend=offs_E.new_zeros(1))
    for e, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        if size == 0 and accumulate:
            continue
        tokens = slice(start, start + size)
        a_e, b_e = (
            (lines(*operand[:2], operand[3], tokens), None if operand[2] is None else operand[2][e : e + 1]) for operand in (a, b)
        )
        y = product(a_e, b_e)
        out_EOC[e] = out_EOC[e].float() + y if accumulate else y


def product(a, b) -> Tensor:
    """(lines, global scale per line or None) of a and b -> FP32 (M, O)."""
    (a_MC, a_scale), (b_OC, b_scale) = a, b
    y_MO = a_MC @ b_OC.T
    if a_scale is not None:
        y_MO = y_MO * a_scale[:, None]
    return y_MO if b_scale is None else y_MO * b_scale


def group(operand, rows: slice, contraction: slice):
    values, scales, global_scale, format = operand
    scales = None if scales is None else scales[rows]
    return lines(values[rows], scales, format, contraction), None if global_scale is None else global_scale[rows]


def expert(operand, e: int, contraction: int):
    values, scales, global_scale, format = operand
    scales = None if scales is None else scales[e]
    values = lines(values[e], scales, format, slice(0, contraction))
    return values, None if global_scale is None else global_scale[e]


def logical_contraction(operand) -> int:
    """Length of the contraction; a packed operand's may be one too long, by an element that is zero."""
    values, format = operand[0], operand[3]
    return values.shape[-1] * (2 if format in FORMATS and FORMATS[format].bits == 4 else 1)


def lines(values: Tensor, scales: Tensor | None, format: str, contraction: slice) -> Tensor:
    """FP32 values of (lines, contraction), without the global scale."""
    if format not in FORMATS:
        return values[:, contraction].float()
    fmt = FORMATS[format]
    codes = unpack_fp4(values, 2 * values.shape[1]) if fmt.bits == 4 else values
    x = decode(codes, fmt.element)
    scale = decode(scales, fmt.scale_element).repeat_interleave(fmt.block, dim=1)[:, : x.shape[1]]
    return (x * scale)[:, contraction]
