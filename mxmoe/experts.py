"""The experts of a routed layer: forward and backward over the verbs, a page each, joined as one differentiable op.

    rows = permute(x)                                 dy_rows, dweights = unpermute_backward(dy, y_rows, weights)
    h = grouped_mm(rows, w13) + b13                   da = grouped_mm(dy_rows, w2^T);  dw2 = wgrad(dy_rows, a)
    a = swiglu(h)                                     dh = swiglu_backward(da, h)
    y_rows = grouped_mm(a, w2) + b2                   dx_rows = grouped_mm(dh, w13^T);  dw13 = wgrad(dh, rows)
    y = unpermute(y_rows, weights)                    dx = unpermute(dx_rows)

Each GEMM reads its operands in the format of the recipe (`mxmoe.recipes`); row copies feed forward and dgrad, column copies
feed wgrad, and both are made from the same high-precision value. Where the recipe quantizes, column copies of rows and a are
made in the backward, from x and h, so that the forward saves h and y_rows only. Shapes as in `mxmoe.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mxmoe import ops
from mxmoe.formats import FORMATS, MXTensor
from mxmoe.recipes import Recipe, SwiGLU
from mxmoe.routing import Routing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of an NVFP4 copy: a token's own scale, but one for all tokens of an expert where they are contracted over.
COPY = {"row": {"axis": "row"}, "column": {"axis": "column", "scope": "group"}}
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


@dataclass(frozen=True)
class Parameters:
    """The arguments whose dtype and layout their gradients take."""

    w13: Tensor | None
    w2: Tensor | None
    b13: Tensor | None
    b2: Tensor | None


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

    @property
    def saved(self) -> tuple[str, ...]:
        """What the forward keeps for the backward: operands that wgrad reads as they are, h, y_rows."""
        same = self.recipe.backward in DTYPES
        kept = {
            "rows": same and self.needs.w13,
            "h": self.needs.h or (self.needs.w2 and not same),
            "a": same and self.needs.w2,
            "y_rows": self.needs.weights,
        }
        return tuple(name for name, wanted in kept.items() if wanted)


@dataclass(frozen=True)
class WeightOperand:
    """A weight as one GEMM reads it, made when that runs and dropped after; `partner`: the format of what it multiplies."""

    partner: str
    make: Callable[[], Operand]


def make_operand(t: Tensor, format: str, axis: str, offs: Tensor | None, backend: str) -> Operand:
    """One GEMM operand of `t`: itself in that dtype, or its block-scaled copy."""
    if format in DTYPES:
        return t.to(DTYPES[format])
    return ops.quantize(t, format, offs=offs, backend=backend, **COPY[axis])


def lies_transposed(w: Tensor) -> bool:
    """Whether neighbours in memory are those of the last dimension but one, as of weights that are stored (E, C, O)."""
    return w.stride(-2) == 1 and w.stride(-1) != 1


def weight_operand(w: Tensor, format: str, axis: str, backend: str) -> Operand:
    """The copy of weight (E, O, C) along `axis`; where that lies transposed the other copy of what is stored, which is the same."""
    if format in FORMATS and not FORMATS[format].has_global_scale and lies_transposed(w):
        w, axis = w.transpose(1, 2), "row" if axis == "column" else "column"
    return make_operand(w, format, axis, None, backend)


def make_operands(make: Callable, row: str | None, column: str | None):
    """(row operand, column operand) of the rows that make() computes and make(format=, axis=, ...) quantizes on the way; None
    where no format is given; one pass where both are the same."""
    if row == column and row in DTYPES:
        return (make().to(DTYPES[row]),) * 2
    if row == column and row is not None and not FORMATS[row].has_global_scale:
        return make(format=row, axis="both")
    return tuple(
        None if f is None else make().to(DTYPES[f]) if f in DTYPES else make(format=f, **COPY[axis])
        for f, axis in ((row, "row"), (column, "column"))
    )


def dgrad_operand(w: Operand, recipe: Recipe, backend: str) -> Operand:
    """Weight (E, O, C) as the operand (E, C, O) that contracts over its outputs."""
    if isinstance(w, MXTensor):  # frozen, without a column copy: its elements times block scales are exact in BF16
        return ops.dequantize(w, recipe.compute_dtype, backend=backend).transpose(1, 2)
    operand = weight_operand(w, recipe.backward, "column", backend)
    return operand if isinstance(operand, MXTensor) else operand.transpose(1, 2)


def experts_forward(x, weights, routing: Routing, w13: WeightOperand, w2: WeightOperand, b13, b2, plan: Plan):
    """(y (T, D), `plan.saved` by name)."""
    recipe, offs = plan.recipe, routing.offs
    product = partial(ops.grouped_mm, offs=offs, out_dtype=recipe.compute_dtype, backend=plan.backend)
    rows, _ = make_operands(partial(permuted, x, routing, plan), recipe.forward, None)
    h = product(rows, w13.make(), bias=b13)
    a, _ = make_operands(partial(activated, h, offs, plan), recipe.forward, None)
    y_rows = product(a, w2.make(), bias=b2)
    y = ops.unpermute(y_rows, routing, weights, out_dtype=plan.out_dtype, backend=plan.backend)
    made = {"rows": rows, "h": h, "a": a, "y_rows": y_rows}
    return y, {name: made[name] for name in plan.saved}


def experts_backward(dy, saved, x, weights, routing: Routing, w13_t: WeightOperand, w2_t: WeightOperand, like, plan: Plan):
    """Gradients of (x, weights, w13, w2, b13, b2), None where not needed; like: Parameters."""
    recipe, needs, offs, backend = plan.recipe, plan.needs, routing.offs, plan.backend
    product = partial(ops.grouped_mm, offs=offs, out_dtype=recipe.compute_dtype, backend=backend)
    keep, h, y_rows = recipe.backward, saved.get("h"), saved.get("y_rows")
    dx = dweights = dw13 = dw2 = db13 = db2 = None

    def dy_rows(**copies):
        nonlocal dweights, y_rows  # found with the first copy
        rows, found = ops.unpermute_backward(
            dy, routing, weights, y_rows, rows_dtype=recipe.compute_dtype, backend=backend, **copies
        )
        if y_rows is not None:
            dweights, y_rows = found, None
        return rows

    def dh(**copies):
        return ops.swiglu_backward(da, h, plan.activation, gate_up=plan.gate_up, offs=offs, backend=backend, **copies)

    dy_row, dy_col = make_operands(dy_rows, w2_t.partner if needs.h else None, keep if needs.w2 else None)
    if needs.b2 or y_rows is not None:
        rows = dy_rows()
        db2 = bias_grad(rows, offs, like.b2.dtype, backend) if needs.b2 else None
        del rows
    if needs.w2:
        a_col = saved["a"] if "a" in saved else make_operands(partial(activated, h, offs, plan), None, keep)[1]
        dw2 = weight_grad(dy_col, a_col, offs, like.w2, backend)
        del dy_col, a_col
    if needs.h:
        da = product(dy_row, w2_t.make())
        del dy_row
        dh_row, dh_col = make_operands(dh, w13_t.partner if needs.x else None, keep if needs.w13 else None)
        if needs.b13:
            db13 = bias_grad(dh(), offs, like.b13.dtype, backend)
        del da
    if needs.x:
        dx_rows = product(dh_row, w13_t.make())
        dx = ops.unpermute(dx_rows, routing, out_dtype=x.dtype, backend=backend)
        del dh_row, dx_rows
    if needs.w13:
        x_col = saved["rows"] if "rows" in saved else make_operands(partial(permuted, x, routing, plan), None, keep)[1]
        dw13 = weight_grad(dh_col, x_col, offs, like.w13, backend)
    return dx, dweights, dw13, dw2, db13, db2


def permuted(x: Tensor, routing: Routing, plan: Plan, **copies):
    """Rows of x in expert order, in the compute dtype, or their copies."""
    return ops.permute(x if copies else x.to(plan.recipe.compute_dtype), routing, backend=plan.backend, **copies)


def activated(h: Tensor, offs: Tensor, plan: Plan, **copies):
    """a = swiglu(h), or its copies."""
    return ops.swiglu(h, plan.activation, gate_up=plan.gate_up, offs=offs, backend=plan.backend, **copies)


def weight_grad(dy: Operand, x: Operand, offs: Tensor, w: Tensor, backend: str, in_fp32=False) -> Tensor:
    """(E, O, C) in the dtype of w (..., O, C) and in its layout, so that autograd need not copy it into the parameter's."""
    made = torch.bfloat16 if w.dtype == torch.bfloat16 else torch.float32
    product = partial(ops.grouped_mm_wgrad, offs=offs, in_fp32=in_fp32, out_dtype=made, backend=backend)
    return (product(x, dy).transpose(1, 2) if lies_transposed(w) else product(dy, x)).to(w.dtype)


def bias_grad(dy: Tensor, offs: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """(E, O): sum of each group's rows, as a weight gradient whose input is one."""
    ones = torch.ones(dy.shape[0], 1, dtype=dy.dtype, device=dy.device)
    return ops.grouped_mm_wgrad(dy, ones, offs, backend=backend).squeeze(-1).to(dtype)
