"""`linear`: y = x . w^T through grouped_mm with one group, so that a row's bytes do not depend on the other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from mxmoe import backends, ops
from mxmoe.checks import FLOATS, check_tensor
from mxmoe.experts import Operand, dgrad_operand, make_operand, make_operands, weight_grad
from mxmoe.ops.registration import LIBRARY, OPS, once_differentiable, refuse_forward_mode
from mxmoe.ops.rows import flat_rows
from mxmoe.recipes import RECIPES, Recipe, get_recipe


def linear(
    x: Tensor, w: Tensor, *, recipe: str | Recipe = "bf16", out_dtype: torch.dtype | None = None, backend: str = "auto"
) -> Tensor:
    """y = x . w^T: x (..., C), w (O, C) -> (..., O) of out_dtype (default x's). Operands in the recipe's formats.

    Differentiable in x and w. The same bytes for a row alone or in any batch. Raises TypeError, ValueError.
    """
    check_tensor("x", x, tuple(range(1, 16)))
    check_tensor("w", w, 2, FLOATS, x)
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"x must have w's {w.shape[1]} columns, got shape {tuple(x.shape)}")
    name = backends.resolve(backend, x.device.type)
    flat = flat_rows(x)
    refuse_forward_mode(x, w)
    needs = [torch.is_grad_enabled() and t.requires_grad for t in (x, w)]
    y = OPS.linear(flat, w, get_recipe(recipe).name, out_dtype or x.dtype, needs, name)
    return y.reshape(*x.shape[:-1], w.shape[0])


LIBRARY.define("linear(Tensor x, Tensor w, str recipe, ScalarType out_dtype, bool[] needs, str backend) -> Tensor")
LIBRARY.define("linear_backward(Tensor dy, Tensor x, Tensor w, str recipe, bool[] needs, str backend) -> Tensor[]")


def _one_group(x: Tensor) -> Tensor:
    return torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)


def _operand(t: Tensor, format: str, axis: str, offs: Tensor | None, backend: str) -> Operand:
    """For FP32 t as it is: products in FP32 read 16 bits as what they are."""
    return t if format == "fp32" else make_operand(t, format, axis, offs, backend)


def _linear(x, w, recipe, out_dtype, needs, backend):
    r = RECIPES[recipe]
    offs = _one_group(x)
    x_row = _operand(x, r.forward, "row", offs, backend)
    w_row = _operand(w.unsqueeze(0), r.forward, "row", None, backend)
    return ops.grouped_mm(x_row, w_row, offs, in_fp32=r.forward == "fp32", out_dtype=out_dtype, backend=backend)


def _linear_backward(dy, x, w, recipe, needs, backend):
    r = RECIPES[recipe]
    offs, in_fp32 = _one_group(x), r.backward == "fp32"
    dy = dy.to(r.compute_dtype)

    def copies_of_dy(**copies):
        return ops.quantize(dy, offs=offs, backend=backend, **copies) if copies else dy

    dy_row, dy_col = make_operands(copies_of_dy, *(r.backward if n else None for n in needs))
    grads = []
    if needs[0]:
        w_t = w.T.unsqueeze(0) if in_fp32 else dgrad_operand(w.unsqueeze(0), r, backend)
        grads.append(ops.grouped_mm(dy_row, w_t, offs, in_fp32=in_fp32, out_dtype=x.dtype, backend=backend))
    if needs[1]:
        x_col = _operand(x, r.backward, "column", offs, backend)
        grads.append(weight_grad(dy_col, x_col, offs, w, backend, in_fp32=in_fp32).squeeze(0))
    return grads


def _setup(ctx, inputs, output):
    x, w, recipe, _, needs, backend = inputs
    ctx.save_for_backward(x, w)
    ctx.options = (recipe, needs, backend)


@once_differentiable
def _backward(ctx, dy):
    recipe, needs, backend = ctx.options
    made = iter(OPS.linear_backward(dy, *ctx.saved_tensors, recipe, needs, backend))
    return *(next(made) if n else None for n in needs), None, None, None, None


for _name, _body in (("linear", _linear), ("linear_backward", _linear_backward)):
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mxmoe::{_name}", _body, lib=LIBRARY)
torch.library.register_autograd("mxmoe::linear", _backward, setup_context=_setup, lib=LIBRARY)
