"""quantize and dequantize: high precision <-> one copy in a block-scaled format.

Every copy is seen as (B, lines, contraction): a row copy's lines are rows, a column copy's are columns. Groups are taken one by
one, each as if it were alone. docs/numerics.md has the bits; the shapes are those of the contract in mxmoe/backends.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mxmoe import layout
from mxmoe.backends.reference.blocks import hadamard, pack_fp4, quantize_blocks, unpack_fp4
from mxmoe.backends.reference.philox import random_words
from mxmoe.casts import decode
from mxmoe.formats import FORMATS, Format, QuantizeOptions


def quantize(x_BRL, offs_E, format, options: QuantizeOptions, row, column):
    for axis, copy in (("row", row), ("column", column)):
        if copy is not None:
            _quantize_copy(x_BRL, offs_E, FORMATS[format], options, axis, copy)


def dequantize(values, scales, global_scale, offs_E, format, axis, scope, out_BRL):
    fmt = FORMATS[format]
    out_BRL.zero_()  # rows past the last group
    for group in _groups((values, scales, global_scale), offs_E, fmt, axis, scope, out_BRL.shape[1]):
        out = _lines(out_BRL[:, group.rows], axis)
        length = out.shape[2]
        codes = unpack_fp4(group.values, length) if fmt.bits == 4 else group.values
        scale = decode(group.scales, fmt.scale_element).repeat_interleave(fmt.block, dim=2)[..., :length]
        x = decode(codes, fmt.element) * scale
        out.copy_(x * group.global_scale if fmt.has_global_scale else x)


def _quantize_copy(x_BRL, offs_E, fmt: Format, options: QuantizeOptions, axis: str, copy):
    if offs_E is not None:  # padding and rows past the last group
        for t in copy:
            if t is not None:
                t.zero_()
    groups = _groups(copy, offs_E, fmt, axis, options.scope, x_BRL.shape[1])
    # A 2-D tile is turned, not quantized again, so that both copies hold the same values.
    turned = axis == "column" and options.block_2d
    sources = [_lines(x_BRL[:, group.rows].float(), "row" if turned else axis) for group in groups]
    if options.hadamard:
        sources = [hadamard(source) for source in sources]
    if fmt.has_global_scale:
        amaxes = [_scope_amax(source, options.scope) for source in sources]
        if options.scope == "tensor":
            amaxes = [torch.stack(amaxes).amax(0)] * len(groups) if amaxes else []
        for group, amax in zip(groups, amaxes, strict=True):
            group.global_scale.copy_(_global_scale(amax, options))
    for group, source in zip(groups, sources, strict=True):
        words = None
        if options.seed is not None:
            stream = 0 if axis == "row" or turned else 1
            x = x_BRL[:, group.rows]
            words = random_words(x.numel(), options.seed, stream, x.device).view(x.shape)
            words = _lines(words, "row" if turned else axis)
        codes, scales = quantize_blocks(source, group.global_scale, fmt, options, words)
        if turned:
            codes, scales = codes.transpose(1, 2), _turn(scales, fmt.block, codes.shape[2])
        group.values.copy_(pack_fp4(codes) if fmt.bits == 4 else codes)
        group.scales.copy_(scales)


def _scope_amax(x_BXC: Tensor, scope: str) -> Tensor:
    """max |x| (NaN where one is NaN, 0 where empty) of every line (B, X, 1), every matrix (B, 1, 1) or everything (1, 1, 1)."""
    amax = F.pad(x_BXC.abs(), (0, 1)).amax(2, keepdim=True)
    if scope == "row":
        return amax
    amax = F.pad(amax, (0, 0, 0, 1)).amax(1, keepdim=True)
    return amax if scope == "group" else F.pad(amax, (0, 0, 0, 0, 0, 1)).amax(0, keepdim=True)


def _global_scale(amax: Tensor, options: QuantizeOptions) -> Tensor:
    """s_dec: amax / (6 * 448), or / (6 * 256) where four_six needs room for amax / 4; 1 where that is 0; NaN where not finite."""
    s_dec = amax / torch.full_like(amax, 1536.0 if options.four_six else 2688.0)
    s_dec = s_dec.masked_fill(s_dec == 0, 1.0)
    return s_dec.masked_fill(~amax.isfinite(), float("nan"))


def _turn(scales: Tensor, block: int, lines: int) -> Tensor:
    """Scales (B, R, blocks of L) of 2-D tiles, expanded over R -> (B, L, blocks of R), expanded over L."""
    return scales[:, ::block].transpose(1, 2).repeat_interleave(block, dim=1)[:, :lines]


def _lines(x_BRL: Tensor, axis: str) -> Tensor:
    return x_BRL if axis == "row" else x_BRL.transpose(1, 2)


@dataclass
class _Group:
    """Views of what one group owns of a copy, lines first; bytes as uint8."""

    rows: slice  # of the source
    values: Tensor  # (B, lines, contraction), or packed (B, lines, ceil(contraction / 2))
    scales: Tensor  # (B, lines, blocks)
    global_scale: Tensor | None  # (B or 1, lines or 1, 1)


def _groups(copy, offs_E, fmt: Format, axis: str, scope: str, num_rows: int) -> list[_Group]:
    """The groups of a copy; without offs everything is one group. (Reads offs on the host.)"""
    values, scales, global_scale = copy
    values, scales = values.view(torch.uint8), scales.view(torch.uint8)
    if axis == "column" and fmt.bits == 8:
        values = values.transpose(1, 2)
    if offs_E is None:
        return [_Group(slice(0, num_rows), values, scales, _broadcast(global_scale, scope))]
    groups, first = [], 0
    for g, (end, start) in enumerate(zip(offs_E.tolist(), layout.padded_starts(offs_E).tolist(), strict=True)):
        rows = slice(first, end)
        if axis == "row":
            own_values, own_scales = values[:, rows], scales[:, rows]
        else:  # `start` is the group's first position along the contraction
            own_values = _cut(values, start, end - first, 8 // fmt.bits)
            own_scales = _cut(scales, start, end - first, fmt.block)
        own_global = _broadcast(global_scale, scope)
        if fmt.has_global_scale and scope != "tensor":
            own_global = own_global[:, rows] if scope == "row" else own_global[g : g + 1]
        groups.append(_Group(rows, own_values, own_scales, own_global))
        first = end
    return groups


def _cut(t: Tensor, start: int, length: int, per_entry: int) -> Tensor:
    """Entries of `t` along its last axis for `length` contraction positions from `start`, `per_entry` of them in each."""
    return t[..., start // per_entry : start // per_entry + -(-length // per_entry)]


def _broadcast(global_scale: Tensor | None, scope: str) -> Tensor | None:
    if global_scale is None:
        return None
    return global_scale[..., None] if scope == "row" else global_scale[:, None, None]
