"""permute, unpermute, swiglu and their backward verbs: everything that moves or maps rows between the GEMMs."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from mxmoe import backends
from mxmoe.checks import (
    FLOATS,
    check_choice,
    check_device,
    check_index_values,
    check_offs,
    check_offs_values,
    check_out,
    check_shape,
    check_tensor,
)
from mxmoe.formats import FORMATS, MXTensor, QuantizeOptions
from mxmoe.memory import empty
from mxmoe.ops.quantize import make_copies, quantize
from mxmoe.ops.registration import OPS, backend_for, dtype_format, fill_op
from mxmoe.recipes import SwiGLU
from mxmoe.routing import Routing

GATE_UP = ("concatenated", "interleaved")


# What every verb that fills copies instead takes last: docs in mxmoe/backends.
COPIES = (
    "str? format, str scale_mode, Tensor(x!)? row_values, Tensor(y!)? row_scales, Tensor(z!)? column_values, "
    "Tensor(w!)? column_scales, str backend"
)
NO_COPIES = (None, "rceil", None, None, None, None)


def _copies(format, scale_mode, row_values, row_scales, column_values, column_scales):
    if format is None:
        return None
    row = None if row_values is None else (row_values, row_scales, None)
    return format, scale_mode, row, None if column_values is None else (column_values, column_scales, None)


@fill_op(f"permute(Tensor x, Tensor permutation, int top_k, Tensor(a!)? out, Tensor? offs, {COPIES})")
def _permute(x, permutation, top_k, out, offs, *rest):
    *copies, backend = rest
    check_index_values("permutation", permutation, x.shape[0] * top_k)
    backends.get(backend).permute(x, permutation, top_k, out, offs, _copies(*copies))


@fill_op("unpermute(Tensor y, Tensor inverse, Tensor? weights, Tensor(a!) out, str backend)")
def _unpermute(y, inverse, weights, out, backend):
    check_index_values("inverse", inverse, y.shape[0])
    backends.get(backend).unpermute(y, inverse, weights, out)


@fill_op(
    "unpermute_backward(Tensor dy, Tensor? y, Tensor permutation, Tensor? weights, Tensor(a!)? rows_grad, "
    f"Tensor(b!)? weights_grad, Tensor? offs, {COPIES})"
)
def _unpermute_backward(dy, y, permutation, weights, rows_grad, weights_grad, offs, *rest):
    *copies, backend = rest
    check_index_values("permutation", permutation, permutation.shape[0])
    verb = backends.get(backend).unpermute_backward
    verb(dy, y, permutation, weights, rows_grad, weights_grad, offs, _copies(*copies))


@fill_op(f"swiglu(Tensor h, Tensor? offs, float alpha, float? limit, float offset, bool interleaved, Tensor(a!)? out, {COPIES})")
def _swiglu(h, offs, alpha, limit, offset, interleaved, out, *rest):
    *copies, backend = rest
    check_offs_values(offs, h.shape[0])
    backends.get(backend).swiglu(h, offs, SwiGLU(alpha, limit, offset), interleaved, out, _copies(*copies))


@fill_op(
    "swiglu_backward(Tensor da, Tensor h, Tensor? offs, float alpha, float? limit, float offset, bool interleaved, "
    f"Tensor(a!)? dh, {COPIES})"
)
def _swiglu_backward(da, h, offs, alpha, limit, offset, interleaved, dh, *rest):
    *copies, backend = rest
    check_offs_values(offs, h.shape[0])
    backends.get(backend).swiglu_backward(da, h, offs, SwiGLU(alpha, limit, offset), interleaved, dh, _copies(*copies))


def permute(
    x: Tensor,
    routing: Routing,
    *,
    format: str | None = None,
    axis: str = "row",
    out: Tensor | MXTensor | tuple[MXTensor, MXTensor] | None = None,
    backend: str = "auto",
    **quantize_options,
) -> Tensor | MXTensor | tuple[MXTensor, MXTensor]:
    """Rows in expert order: row n = x[permutation[n] // K]; zero past the last row. With `format`, the copies their GEMMs read.

    x (T, D) FP32, BF16 or FP16 -> (N, D), N = T * K, same dtype, or as `quantize(..., format, axis, offs=routing.offs)` makes it
    of these. Raises ValueError where T differs from the routing's.
    """
    check_tensor("x", x, 2)
    tokens, top_k = routing.ids.shape
    if x.shape[0] != tokens:
        raise ValueError(f"x must have the routing's {tokens} tokens, got {x.shape[0]}")
    check_device("routing", routing, x)
    name = backend_for(backend, x, "permute", dtype_format(x))
    permutation, offs = routing.permutation.contiguous(), routing.offs.contiguous()

    def run(source, out, *copies):
        OPS.permute(_unit_stride(source), permutation, top_k, out, offs, *copies, name)

    shape = (tokens * top_k, x.shape[1])
    if format is not None and axis == "row" and out is None and not quantize_options:
        token = quantize(x, format, backend=backend)  # once for its K rows: bytes move then
        parts = [token.values.view(torch.uint8), token.scales.view(torch.uint8)]
        rows = [empty((shape[0], part.shape[1]), torch.uint8, x, name) for part in parts]
        for part, out in zip(parts, rows, strict=True):
            run(part, out, *NO_COPIES)
        global_scale = token.global_scale
        if global_scale is not None:
            global_scale = torch.empty(shape[0], dtype=torch.float32, device=x.device)
            run(token.global_scale[:, None], global_scale[:, None], *NO_COPIES)
        values, scales = rows[0].view(token.values.dtype), rows[1].view(token.scales.dtype)
        return MXTensor(values, scales, global_scale, format, "row", shape, token.scope, "plain", offs)
    return _rows_or_copies(
        lambda out, *copies: run(x, out, *copies), x, shape, x.dtype, format, axis, offs, out, name, quantize_options
    )


def unpermute(
    y: Tensor,
    routing: Routing,
    weights: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Back to tokens: out[t] = sum over k ascending of weights[t, k] * y[row of (t, k)], in FP32, rounded once.

    y (N, D), weights FP32 (T, K), default 1 -> (T, D). Slots without an expert add nothing.
    """
    check_tensor("y", y, 2)
    check_device("routing", routing, y)
    tokens, top_k = routing.ids.shape
    check_shape("y", y, (tokens * top_k, y.shape[1]))
    if weights is not None:
        check_tensor("weights", weights, 2, (torch.float32,), y)
        check_shape("weights", weights, (tokens, top_k))
        weights = weights.contiguous()
    name = backend_for(backend, y, "unpermute", dtype_format(y))
    out = _rows_out(out, (tokens, y.shape[1]), out_dtype or y.dtype, y, name)
    OPS.unpermute(_unit_stride(y), routing.inverse.contiguous(), weights, out, name)
    return out


def unpermute_backward(
    dy: Tensor,
    routing: Routing,
    weights: Tensor | None = None,
    y: Tensor | None = None,
    *,
    rows_dtype: torch.dtype | None = None,
    format: str | None = None,
    axis: str = "row",
    backend: str = "auto",
    **quantize_options,
) -> tuple[Tensor | MXTensor | tuple[MXTensor, MXTensor], Tensor | None]:
    """Gradients of `unpermute`: rows = rounded(w * dy[token]), weights_grad[t, k] = FP32 dot(dy[t], y row).

    dy (T, D), y (N, D) or None (no weights_grad) -> rows (N, D) of `rows_dtype` (default dy's), or as `quantize(..., format, axis,
    offs=routing.offs)` makes them of these; weights_grad FP32 (T, K) or None.
    """
    check_tensor("dy", dy, 2)
    check_device("routing", routing, dy)
    tokens, top_k = routing.ids.shape
    check_shape("dy", dy, (tokens, dy.shape[1]))
    if weights is not None:
        check_tensor("weights", weights, 2, (torch.float32,), dy)
        check_shape("weights", weights, (tokens, top_k))
        weights = weights.contiguous()
    if y is not None:
        check_tensor("y", y, 2, FLOATS, dy)
        check_shape("y", y, (tokens * top_k, dy.shape[1]))
        y = _unit_stride(y)
    name = backend_for(backend, dy, "unpermute_backward", dtype_format(dy))
    dtype, offs = rows_dtype or dy.dtype, routing.offs.contiguous()
    weights_grad = None if y is None else torch.empty(tokens, top_k, dtype=torch.float32, device=dy.device)

    def run(out, *copies):
        permutation = routing.permutation.contiguous()
        OPS.unpermute_backward(_unit_stride(dy), y, permutation, weights, out, weights_grad, offs, *copies, name)

    fusable = dtype == torch.bfloat16
    shape = (tokens * top_k, dy.shape[1])
    rows = _rows_or_copies(run, dy, shape, dtype, format, axis, offs, None, name, quantize_options, fusable)
    return rows, weights_grad


def swiglu(
    h: Tensor,
    activation: SwiGLU | None = None,
    *,
    gate_up: str = "concatenated",
    offs: Tensor | None = None,
    format: str | None = None,
    axis: str = "row",
    out: Tensor | MXTensor | tuple[MXTensor, MXTensor] | None = None,
    backend: str = "auto",
    **quantize_options,
) -> Tensor | MXTensor | tuple[MXTensor, MXTensor]:
    """g * sigmoid(alpha * g) * (u + offset) in FP32, rounded once to h's dtype; with `format`, the copies its consumers read.

    h (N, 2F) with [g | u] "concatenated" or g0 u0 g1 u1 "interleaved" -> (N, F), or as `quantize(..., format, axis, offs=offs)`
    makes it of that rounded value (fused = unfused; nvfp4 with axis "both": scope "row" of the row copy, "group" of the column
    copy, "tensor" without offs). offs: rows past offs[-1] are zero.
    """
    check_tensor("h", h, 2)
    check_choice("gate_up", gate_up, GATE_UP)
    if h.shape[1] % 2:
        raise ValueError(f"h must have an even number of columns (gate and up), got shape {tuple(h.shape)}")
    if offs is not None:
        offs = check_offs(offs, h)
    a = activation or SwiGLU()
    name = backend_for(backend, h, "swiglu", dtype_format(h))

    def run(out, *copies):
        OPS.swiglu(_unit_stride(h), offs, a.alpha, a.limit, a.offset, gate_up == "interleaved", out, *copies, name)

    shape = (h.shape[0], h.shape[1] // 2)
    return _rows_or_copies(run, h, shape, h.dtype, format, axis, offs, out, name, quantize_options)


def swiglu_backward(
    da: Tensor,
    h: Tensor,
    activation: SwiGLU | None = None,
    *,
    gate_up: str = "concatenated",
    offs: Tensor | None = None,
    format: str | None = None,
    axis: str = "row",
    out: Tensor | MXTensor | tuple[MXTensor, MXTensor] | None = None,
    backend: str = "auto",
    **quantize_options,
) -> Tensor | MXTensor | tuple[MXTensor, MXTensor]:
    """Gradient of `swiglu` with respect to h, rounded once: da (N, F), h (N, 2F) -> (N, 2F), h's dtype and order; with `format`,
    the copies of it, as in `swiglu`."""
    check_tensor("h", h, 2)
    check_tensor("da", da, 2, (h.dtype,), h)
    check_choice("gate_up", gate_up, GATE_UP)
    check_shape("da", da, (h.shape[0], h.shape[1] // 2))
    if offs is not None:
        offs = check_offs(offs, h)
    a = activation or SwiGLU()
    name = backend_for(backend, h, "swiglu_backward", dtype_format(h))
    interleaved = gate_up == "interleaved"

    def run(out, *copies):
        OPS.swiglu_backward(_unit_stride(da), _unit_stride(h), offs, a.alpha, a.limit, a.offset, interleaved, out, *copies, name)

    fusable = interleaved or da.shape[1] % 32 == 0
    return _rows_or_copies(run, h, tuple(h.shape), h.dtype, format, axis, offs, out, name, quantize_options, fusable)


def _rows_or_copies(run, like, shape, dtype, format, axis, offs, out, backend, options, fusable=True):
    """The rows that run(out, *NO_COPIES) fills, or their copies: run(None, format, ...) makes those of MX formats in one pass where
    scale_mode is all that `options` says; others are quantized from memory."""
    if format is None:
        if options:
            raise ValueError(f"{', '.join(options)} need a format to quantize to, got format=None")
        rows = _rows_out(out, shape, dtype, like, backend)
        run(rows, *NO_COPIES)
        return rows
    check_choice("format", format, tuple(FORMATS))
    check_choice("axis", axis, ("row", "column", "both"))
    f, scale_mode = FORMATS[format], options.get("scale_mode", "rceil")
    check_choice("scale_mode", scale_mode, ("rceil", "floor"))
    if fusable and not f.has_global_scale and options.keys() <= {"scale_mode"}:
        copies, (rv, rs, _, cv, cs, _) = make_copies(like, shape, f, axis, offs, QuantizeOptions(scale_mode), out, backend)
        run(None, format, scale_mode, rv, rs, cv, cs)
        return copies if axis == "both" else copies[0]
    rows = empty(shape, dtype, like, backend)
    run(rows, *NO_COPIES)
    if axis == "both" and f.has_global_scale and options.get("scope", "row") == "row":
        row_out, column_out = out or (None, None)
        row = quantize(rows, format, "row", offs=offs, out=row_out, backend=backend, **options)
        options = {**options, "scope": "tensor" if offs is None else "group"}
        return row, quantize(rows, format, "column", offs=offs, out=column_out, backend=backend, **options)
    return quantize(rows, format, axis, offs=offs, out=out, backend=backend, **options)


def flat_rows(t: Tensor) -> Tensor:
    """(..., C) -> (rows, C), where C is 0 too."""
    return t.reshape(prod(t.shape[:-1]), t.shape[-1])


def _rows_out(out, shape, dtype, like, backend) -> Tensor:
    if out is None:
        return empty(shape, dtype, like, backend)
    check_out("out", out, shape, dtype, like)
    return out


def _unit_stride(t: Tensor) -> Tensor:
    """Rows of any distance are read in place; other strides are copied."""
    return t if t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()
