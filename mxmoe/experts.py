"""The experts of a routed layer: forward and backward over the verbs, a page each, joined as one differentiable op.

    rows = permute(x)                                 dy_rows, dweights = unpermute_backward(dy, y_rows, weights)
    h = grouped_mm(rows, w13) + b13                   da = grouped_mm(dy_rows, w2^T);  dw2 = wgrad(dy_rows, a)
    a = swiglu(h)                                     dh = swiglu_backward(da, h)
    y_rows = grouped_mm(a, w2) + b2                   dx_rows = grouped_mm(dh, w13^T);  dw13 = wgrad(dh, rows)
    y = unpermute(y_rows, weights)                    dx = unpermute(dx_rows)

Each GEMM reads its operands in the format of the recipe (`mxmoe.recipes`); row copies feed forward and dgrad, column copies
feed wgrad, and both are made from the same high-precision value. Shapes as in `mxmoe.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mxmoe import ops
from mxmoe.formats import FORMATS, MXTensor
from mxmoe.recipes import Recipe, SwiGLU
from mxmoe.routing import Routing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Operand = Tensor | MXTensor


@dataclass(frozen=True)
class Needs:
    """Which gradients are wanted; what only an unwanted one would read is neither made nor kept."""

    x: bool
    weights: bool
    w13: bool
    w2: bool
    b13: bool
    b2: bool

    @property
    def h(self) -> bool:  # the gradient must pass through the activation
        return self.x or self.w13 or self.b13

    @property
    def rows(self) -> bool:  # the gradient of the expert outputs is used
        return self.h or self.w2 or self.b2


@dataclass(frozen=True)
class Dtypes:
    """Of the gradients: those of the arguments."""

    x: torch.dtype
    w13: torch.dtype | None
    w2: torch.dtype | None
    b13: torch.dtype | None
    b2: torch.dtype | None


@dataclass(frozen=True)
class Plan:
    """Everything about a call that is not a tensor."""

    recipe: Recipe
    activation: SwiGLU
    gate_up: str
    out_dtype: torch.dtype
    recompute: bool
    needs: Needs
    copies: tuple[str, str, str, str]  # formats of the prepared w13, w2 (forward) and w13, w2 (dgrad); "" where not prepared
    backend: str


def make_operand(t: Tensor, format: str, axis: str, offs: Tensor | None, backend: str) -> Operand:
    """One GEMM operand of `t`: itself in that dtype, or its block-scaled copy."""
    if format in DTYPES:
        return t.to(DTYPES[format])
    scope = "row" if axis == "row" else "group"
    return ops.quantize(t, format, axis, offs=offs, scope=scope, backend=backend)


def make_operands(t: Tensor, row: str | None, column: str | None, offs: Tensor, backend: str):
    """(row operand, column operand or None) of routed rows; one pass where both have one format."""
    if row == column and row in FORMATS and not FORMATS[row].has_global_scale:
        return ops.quantize(t, row, "both", offs=offs, backend=backend)
    made = [
        None if format is None else make_operand(t, format, axis, offs, backend)
        for format, axis in ((row, "row"), (column, "column"))
    ]
    return made[0], made[1]


def dgrad_operand(w: Operand, recipe: Recipe, backend: str) -> Operand:
    """Weight (E, O, C) as the operand (E, C, O) that contracts over its outputs."""
    if isinstance(w, MXTensor):  # frozen, without a column copy: its elements times block scales are exact in BF16
        return ops.dequantize(w, recipe.compute_dtype, backend=backend).transpose(1, 2)
    operand = make_operand(w, recipe.backward, "column", None, backend)
    return operand if isinstance(operand, MXTensor) else operand.transpose(1, 2)


def experts_forward(x, weights, routing: Routing, w13: Operand, w2: Operand, b13, b2, plan: Plan):
    """(y, saved): y (T, D) and what the backward reads; w13, w2 are forward operands."""
    recipe, needs, offs, backend = plan.recipe, plan.needs, routing.offs, plan.backend
    keep = recipe.backward
    source = x if recipe.forward in FORMATS else x.to(recipe.compute_dtype)
    rows = ops.permute(source, routing, backend=backend)
    x_row, x_col = make_operands(rows, recipe.forward, keep if needs.w13 else None, offs, backend)
    h = ops.grouped_mm(x_row, w13, offs, bias=b13, out_dtype=recipe.compute_dtype, backend=backend)
    a = ops.swiglu(h, plan.activation, gate_up=plan.gate_up, offs=offs, backend=backend)
    a_row, a_col = make_operands(a, recipe.forward, keep if needs.w2 else None, offs, backend)
    y_rows = ops.grouped_mm(a_row, w2, offs, bias=b2, out_dtype=recipe.compute_dtype, backend=backend)
    y = ops.unpermute(y_rows, routing, weights, out_dtype=plan.out_dtype, backend=backend)
    saved = [x_col if needs.w13 else None, h if needs.h else None, a_col if needs.w2 else None, y_rows if needs.weights else None]
    return y, saved


def experts_backward(dy, saved, weights, routing: Routing, w13_t, w2_t, dtypes: Dtypes, plan: Plan):
    """Gradients of (x, weights, w13, w2, b13, b2), None where not needed; w13_t, w2_t are dgrad operands."""
    recipe, needs, offs, backend = plan.recipe, plan.needs, routing.offs, plan.backend
    x_col, h, a_col, y_rows = saved
    dx = dw13 = dw2 = db13 = db2 = None
    dy_rows, dweights = ops.unpermute_backward(dy, routing, weights, y_rows, rows_dtype=recipe.compute_dtype, backend=backend)
    if needs.rows:
        dy_row, dy_col = make_operands(
            dy_rows, dgrad_format(recipe, w2_t) if needs.h else None, recipe.backward if needs.w2 else None, offs, backend
        )
        if needs.w2:
            dw2 = weight_grad(dy_col, a_col, offs, dtypes.w2, backend)
        if needs.b2:
            db2 = bias_grad(dy_rows, offs, dtypes.b2, backend)
    if needs.h:
        da = ops.grouped_mm(dy_row, w2_t, offs, out_dtype=recipe.compute_dtype, backend=backend)
        dh = ops.swiglu_backward(da, h, plan.activation, gate_up=plan.gate_up, offs=offs, backend=backend)
        dh_row, dh_col = make_operands(
            dh, dgrad_format(recipe, w13_t) if needs.x else None, recipe.backward if needs.w13 else None, offs, backend
        )
        if needs.w13:
            dw13 = weight_grad(dh_col, x_col, offs, dtypes.w13, backend)
        if needs.b13:
            db13 = bias_grad(dh, offs, dtypes.b13, backend)
    if needs.x:
        dx_rows = ops.grouped_mm(dh_row, w13_t, offs, out_dtype=recipe.compute_dtype, backend=backend)
        dx = ops.unpermute(dx_rows, routing, out_dtype=dtypes.x, backend=backend)
    return dx, dweights, dw13, dw2, db13, db2


def dgrad_format(recipe: Recipe, w_t: Operand) -> str:
    """The recipe's format, or BF16 beside a frozen weight that has no column copy."""
    return recipe.backward if isinstance(w_t, MXTensor) or recipe.backward in DTYPES else "bf16"


def weight_grad(dy: Operand, x: Operand, offs: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    made = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    return ops.grouped_mm_wgrad(dy, x, offs, out_dtype=made, backend=backend).to(dtype)


def bias_grad(dy: Tensor, offs: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """(E, O): sum of each group's rows, as a weight gradient whose input is one."""
    ones = torch.ones(dy.shape[0], 1, dtype=dy.dtype, device=dy.device)
    return ops.grouped_mm_wgrad(dy, ones, offs, backend=backend).squeeze(-1).to(dtype)
