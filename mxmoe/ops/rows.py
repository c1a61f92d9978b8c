"""permute, unpermute, swiglu and their backward verbs: everything that moves or maps rows between the GEMMs."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from mxmoe import backends
from mxmoe.checks import (
    FLOATS,
    check_choice,
    check_index_values,
    check_offs,
    check_offs_values,
    check_out,
    check_shape,
    check_tensor,
)
from mxmoe.formats import MXTensor
from mxmoe.memory import empty
from mxmoe.ops.quantize import quantize
from mxmoe.ops.registration import OPS, backend_for, dtype_format, fill_op
from mxmoe.recipes import SwiGLU
from mxmoe.routing import Routing

GATE_UP = ("concatenated", "interleaved")


@fill_op("permute(Tensor x, Tensor permutation, int top_k, Tensor(a!) out, str backend)")
def _permute(x, permutation, top_k, out, backend):
    check_index_values("permutation", permutation, x.shape[0] * top_k)
    backends.get(backend).permute(x, permutation, top_k, out)


@fill_op("unpermute(Tensor y, Tensor inverse, Tensor? weights, Tensor(a!) out, str backend)")
def _unpermute(y, inverse, weights, out, backend):
    check_index_values("inverse", inverse, y.shape[0])
    backends.get(backend).unpermute(y, inverse, weights, out)


@fill_op(
    "unpermute_backward(Tensor dy, Tensor? y, Tensor permutation, Tensor? weights, Tensor(a!) rows_grad, "
    "Tensor(b!)? weights_grad, str backend)"
)
def _unpermute_backward(dy, y, permutation, weights, rows_grad, weights_grad, backend):
    check_index_values("permutation", permutation, permutation.shape[0])
    backends.get(backend).unpermute_backward(dy, y, permutation, weights, rows_grad, weights_grad)


@fill_op("swiglu(Tensor h, Tensor? offs, float alpha, float? limit, float offset, bool interleaved, Tensor(a!) out, str backend)")
def _swiglu(h, offs, alpha, limit, offset, interleaved, out, backend):
    check_offs_values(offs, h.shape[0])
    backends.get(backend).swiglu(h, offs, SwiGLU(alpha, limit, offset), interleaved, out)


@fill_op(
    "swiglu_backward(Tensor da, Tensor h, Tensor? offs, float alpha, float? limit, float offset, bool interleaved, "
    "Tensor(a!) dh, str backend)"
)
def _swiglu_backward(da, h, offs, alpha, limit, offset, interleaved, dh, backend):
    check_offs_values(offs, h.shape[0])
    backends.get(backend).swiglu_backward(da, h, offs, SwiGLU(alpha, limit, offset), interleaved, dh)


def permute(x: Tensor, routing: Routing, *, out: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Rows in expert order: row n = x[permutation[n] // K]; zero past the last row.

    x (T, D) FP32, BF16 or FP16 -> (N, D), N = T * K, same dtype. Raises ValueError where T differs from the routing's.
    """
    check_tensor("x", x, 2)
    tokens, top_k = routing.ids.shape
    if x.shape[0] != tokens:
        raise ValueError(f"x must have the routing's {tokens} tokens, got {x.shape[0]}")
    name = backend_for(backend, x, "permute", dtype_format(x))
    out = _rows_out(out, (tokens * top_k, x.shape[1]), x.dtype, x, name)
    OPS.permute(_unit_stride(x), routing.permutation.contiguous(), top_k, out, name)
    return out


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `unpermute`: rows = rounded(w * dy[token]), weights_grad[t, k] = FP32 dot(dy[t], y row).

    dy (T, D), y (N, D) or None (no weights_grad) -> rows (N, D) of `rows_dtype` (default dy's), weights_grad FP32 (T, K) or None.
    """
    check_tensor("dy", dy, 2)
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
    rows = empty((tokens * top_k, dy.shape[1]), rows_dtype or dy.dtype, dy, name)
    weights_grad = None if y is None else torch.empty(tokens, top_k, device=dy.device)
    OPS.unpermute_backward(_unit_stride(dy), y, routing.permutation.contiguous(), weights, rows, weights_grad, name)
    return rows, weights_grad


def swiglu(
    h: Tensor,
    activation: SwiGLU | None = None,
    *,
    gate_up: str = "concatenated",
    offs: Tensor | None = None,
    format: str | None = None,
    axis: str = "row",
    out: Tensor | None = None,
    backend: str = "auto",
    **quantize_options,
) -> Tensor | MXTensor | tuple[MXTensor, MXTensor]:
    """g * sigmoid(alpha * g) * (u + offset) in FP32, rounded once to h's dtype; with `format`, the copies its consumers read.

    h (N, 2F) with [g | u] "concatenated" or g0 u0 g1 u1 "interleaved" -> (N, F), or as `quantize(..., format, axis, offs=offs)`
    makes it of that rounded value (fused = unfused). offs: rows past offs[-1] are zero.
    """
    check_tensor("h", h, 2)
    check_choice("gate_up", gate_up, GATE_UP)
    if h.shape[1] % 2:
        raise ValueError(f"h must have an even number of columns (gate and up), got shape {tuple(h.shape)}")
    if offs is not None:
        offs = check_offs(offs, h)
    activation = activation or SwiGLU()
    name = backend_for(backend, h, "swiglu", dtype_format(h))
    result = _rows_out(out if format is None else None, (h.shape[0], h.shape[1] // 2), h.dtype, h, name)
    OPS.swiglu(
        _unit_stride(h),
        offs,
        activation.alpha,
        activation.limit,
        activation.offset,
        gate_up == "interleaved",
        result,
        name,
    )
    if format is None:
        return result
    return quantize(result, format, axis, offs=offs, out=out, backend=backend, **quantize_options)


def swiglu_backward(
    da: Tensor,
    h: Tensor,
    activation: SwiGLU | None = None,
    *,
    gate_up: str = "concatenated",
    offs: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Gradient of `swiglu` with respect to h, rounded once: da (N, F), h (N, 2F) -> (N, 2F), h's dtype and order."""
    check_tensor("h", h, 2)
    check_tensor("da", da, 2, (h.dtype,), h)
    check_choice("gate_up", gate_up, GATE_UP)
    check_shape("da", da, (h.shape[0], h.shape[1] // 2))
    if offs is not None:
        offs = check_offs(offs, h)
    activation = activation or SwiGLU()
    name = backend_for(backend, h, "swiglu_backward", dtype_format(h))
    out = _rows_out(out, tuple(h.shape), h.dtype, h, name)
    OPS.swiglu_backward(
        _unit_stride(da), _unit_stride(h), offs, activation.alpha, activation.limit, activation.offset,
        gate_up == "interleaved", out, name,
    )  # fmt: skip
    return out


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
