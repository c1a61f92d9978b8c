"""Verbs on the routed rows: permute and un-permute by expert, SwiGLU, and their backward forms.

Everything is computed in FP32 and rounded once to the dtype of the output (BF16, FP16 or FP32).
"""

import torch
from torch import Tensor

from mxmoe.backends.reference.arithmetic import sigmoid, sum_lanes
from mxmoe.backends.reference.quantize import quantize
from mxmoe.formats import QuantizeOptions


def _quantized(verb, dtype, shape, offs, copies):
    """The copies of what verb(out) computes, of that dtype and shape."""
    format, scale_mode, row, column = copies
    out = torch.empty(shape, dtype=dtype, device=(row or column)[0].device)
    verb(out)
    quantize(out[None], offs, format, QuantizeOptions(scale_mode), row, column)


def permute(x, permutation, top_k, out, offs=None, copies=None):
    """out[n] = x[permutation[n] // top_k]; zero where permutation[n] is -1."""
    if copies is not None:
        shape = (len(permutation), x.shape[1])
        return _quantized(lambda rows: permute(x, permutation, top_k, rows), x.dtype, shape, offs, copies)
    rows = x.index_select(0, permutation.clamp(min=0) // top_k) if len(x) else x.new_zeros(len(permutation), x.shape[1])
    out.copy_(rows.masked_fill((permutation < 0)[:, None], 0))


def unpermute(y, inverse, weights, out):
    """out[t] = sum over k ascending of fl(weights[t, k] * y[inverse[t, k]]) in FP32; a slot without a row adds none."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for k in range(inverse.shape[1] if len(y) else 0):
        row = y.index_select(0, inverse[:, k].clamp(min=0)).float()
        product = row if weights is None else weights[:, k, None] * row
        total = torch.where((inverse[:, k] >= 0)[:, None], total + product, total)
    out.copy_(total)


def unpermute_backward(dy, y, permutation, weights, rows_grad_out, weights_grad_out, offs=None, copies=None):
    """rows_grad[n] = w[slot] * dy[slot // K], zero where there is no slot; weights_grad[slot] = dot(dy[slot // K],
    y[n]), summed like a sum over experts (32 lanes, then a tree), 0 where the slot has no row."""
    if copies is not None:

        def verb(rows):
            unpermute_backward(dy, y, permutation, weights, rows, weights_grad_out)

        return _quantized(verb, torch.bfloat16, (len(permutation), dy.shape[1]), offs, copies)
    has_row = permutation >= 0
    slots = permutation.clamp(min=0).long()
    if weights_grad_out is not None:
        weights_grad_out.zero_()
    if len(dy) == 0 or len(slots) == 0:
        rows_grad_out.zero_()
        return
    top_k = len(permutation) // len(dy)
    rows = dy.index_select(0, slots // top_k).float()
    scaled = rows if weights is None else weights.flatten()[slots][:, None] * rows
    rows_grad_out.copy_(scaled.masked_fill(~has_row[:, None], 0.0))
    if y is not None and weights_grad_out is not None:
        products = (rows * y.float()).masked_fill(~has_row[:, None], 0.0)
        dots = torch.zeros(len(slots) + 1, dtype=torch.float32, device=dy.device)
        dots[torch.where(has_row, slots, len(slots))] = sum_lanes(products)[:, 0]
        weights_grad_out.copy_(dots[:-1].view_as(weights_grad_out))


def _gate_up(h: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(gate, up) as views: columns [g; u], or g0, u0, g1, u1, ... when interleaved."""
    return h.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else h.chunk(2, dim=-1)


def _activation(h: Tensor, activation, interleaved: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(clamped g, sigmoid(alpha * g), g * sigmoid, clamped u + offset); alpha 1 and offset 0 skip their operation."""
    g, u = (part.float() for part in _gate_up(h, interleaved))
    if activation.limit is not None:
        g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit)  # both keep NaN
    s = sigmoid(g if activation.alpha == 1 else g * activation.alpha)
    return g, s, g * s, u if activation.offset == 0 else u + activation.offset


def _rows_of_groups(rows: int, offs: Tensor | None, device) -> Tensor:
    """bool (rows, 1): rows before offs[-1]."""
    index = torch.arange(rows, device=device)[:, None]
    return index >= 0 if offs is None or len(offs) == 0 else index < offs[-1]


def swiglu(h, offs, activation, interleaved, out, copies=None):
    """out = fl(fl(g * sigmoid(fl(alpha * g))) * fl(u + offset)), g and u clamped; rows past offs[-1] are zero."""
    if copies is not None:
        shape = (len(h), h.shape[1] // 2)
        return _quantized(lambda rows: swiglu(h, offs, activation, interleaved, rows), h.dtype, shape, offs, copies)
    _, _, gate, up = _activation(h, activation, interleaved)
    out.copy_(torch.where(_rows_of_groups(len(h), offs, h.device), gate * up, 0.0))


def swiglu_backward(da, h, offs, activation, interleaved, dh_out, copies=None):
    """du = da * (g * s);  dg = (da * (u + offset)) * (s * (1 + alpha * g * (1 - s))), s = sigmoid(alpha * g); 0 if
    clamped."""
    if copies is not None:

        def verb(dh):
            swiglu_backward(da, h, offs, activation, interleaved, dh)

        return _quantized(verb, h.dtype, h.shape, offs, copies)
    g, s, gate, up = _activation(h, activation, interleaved)
    da = da.float()
    scaled = g if activation.alpha == 1 else g * activation.alpha
    du = da * gate
    dg = (da * up) * (s * (1 + scaled * (1 - s)))
    if activation.limit is not None:
        raw_g, raw_u = _gate_up(h, interleaved)
        dg = dg.masked_fill(raw_g > activation.limit, 0.0)
        du = du.masked_fill(raw_u.abs() > activation.limit, 0.0)
    inside = _rows_of_groups(len(h), offs, h.device)
    for part, grad in zip(_gate_up(dh_out, interleaved), (dg, du), strict=True):
        part.copy_(torch.where(inside, grad, 0.0))
