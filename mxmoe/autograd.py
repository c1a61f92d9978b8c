"""`mxmoe::experts`: the experts' forward and backward (`mxmoe.experts`) as torch ops joined by autograd.

Ops take plain tensors, so operands and saved values are flattened here and put together again: a high-precision operand is one
tensor, an MX copy two (values, scales), an NVFP4 copy three (and the global scale). The bodies run on fake tensors as they are,
since the verbs inside are ops themselves: they are their own shape functions.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from mxmoe.experts import (
    DTYPES,
    Needs,
    Operand,
    Parameters,
    Plan,
    WeightOperand,
    dgrad_operand,
    experts_backward,
    experts_forward,
    weight_operand,
)
from mxmoe.formats import FORMATS, MXTensor
from mxmoe.layout import PANEL_LINES
from mxmoe.ops.registration import LIBRARY, OPS, once_differentiable
from mxmoe.recipes import RECIPES, SwiGLU
from mxmoe.routing import Routing

_TENSORS = (
    "Tensor x, Tensor weights, Tensor ids, Tensor counts, Tensor offs, Tensor permutation, Tensor inverse, "
    "Tensor? w13, Tensor? w2, Tensor? b13, Tensor? b2, Tensor[] copies"
)
_PLAN = (
    "str recipe, float alpha, float? limit, float offset, str gate_up, ScalarType out_dtype, bool recompute, bool[] needs, "
    "str copy_formats, str backend"
)
NUM_TENSORS, NUM_PLAN = 12, 10
LIBRARY.define(f"experts({_TENSORS}, {_PLAN}) -> Tensor[]")
LIBRARY.define(f"experts_backward(Tensor dy, Tensor[] saved, {_TENSORS}, {_PLAN}) -> Tensor[]")


def plan_arguments(plan: Plan) -> tuple:
    """A Plan as the op's plain arguments; `plan_of` is the inverse."""
    a, n = plan.activation, plan.needs
    needs = [n.x, n.weights, n.w13, n.w2, n.b13, n.b2]
    names = plan.recipe.name, a.alpha, a.limit, a.offset, plan.gate_up
    return *names, plan.out_dtype, plan.recompute, needs, ",".join(plan.copies), plan.backend


def plan_of(*arguments) -> Plan:
    return _plan(*(tuple(a) if isinstance(a, list) else a for a in arguments))


@lru_cache(maxsize=256)
def _plan(recipe, alpha, limit, offset, gate_up, out_dtype, recompute, needs, copy_formats, backend) -> Plan:
    copies = tuple(copy_formats.split(","))
    return Plan(RECIPES[recipe], SwiGLU(alpha, limit, offset), gate_up, out_dtype, recompute, Needs(*needs), copies, backend)


# ------------------------------------------------------------------------------------------------- flattening of operands


def operand_fields(t: Operand | None) -> list[Tensor]:
    """An operand as plain tensors."""
    if t is None:
        return []
    if isinstance(t, MXTensor):
        return [t.values, t.scales] if t.global_scale is None else [t.values, t.scales, t.global_scale]
    return [t]


def take_operand(fields: list[Tensor], format: str, axis: str, shape) -> Operand:
    """The inverse: takes an operand off the head of `fields`; shape is its source's."""
    if format in DTYPES:
        return fields.pop(0)
    values, scales = fields.pop(0), fields.pop(0)
    global_scale = fields.pop(0) if FORMATS[format].has_global_scale else None
    scope = "row"
    if global_scale is not None and global_scale.ndim == 1:
        scope = "tensor" if global_scale.shape[0] == 1 else "group"
    return MXTensor(values, scales, global_scale, format, axis, tuple(shape), scope)


def _weight_operands(x, w13, w2, copies, plan: Plan):
    """The prepared copies (forward w13, forward w2, dgrad w13, dgrad w2), None where there is none."""
    first = copies[0] if w13 is None else w13
    experts, hidden = first.shape[0], first.shape[1] * (PANEL_LINES if first.ndim == 4 else 1)
    shapes = ((experts, hidden, x.shape[1]), (experts, x.shape[1], hidden // 2)) * 2
    fields = list(copies)
    axes = ("row", "row", "column", "column")
    return [
        take_operand(fields, format, axis, shape) if format else None
        for format, axis, shape in zip(plan.copies, axes, shapes, strict=True)
    ]


def _forward_operands(x, w13, w2, copies, plan: Plan) -> list[WeightOperand]:
    prepared, format = _weight_operands(x, w13, w2, copies, plan)[:2], plan.recipe.forward
    return [
        WeightOperand(format, partial(weight_operand, w, format, "row", plan.backend) if p is None else partial(_same, p))
        for w, p in zip((w13, w2), prepared, strict=True)
    ]


def _dgrad_operands(x, w13, w2, copies, plan: Plan) -> list[WeightOperand]:
    prepared, format = _weight_operands(x, w13, w2, copies, plan), plan.recipe.backward
    made = []
    for w, row, column in zip((w13, w2), prepared[:2], prepared[2:], strict=True):
        if column is not None:
            operand = column if isinstance(column, MXTensor) else column.transpose(1, 2)
            made.append(WeightOperand(format, partial(_same, operand)))
        else:  # beside a frozen weight that has no column copy, BF16
            partner = "bf16" if w is None and format in FORMATS else format
            made.append(WeightOperand(partner, partial(dgrad_operand, row if w is None else w, plan.recipe, plan.backend)))
    return made


def _same(operand: Operand) -> Operand:
    return operand


# ----------------------------------------------------------------------------------------------------------------- the ops


def _experts(x, weights, ids, counts, offs, permutation, inverse, w13, w2, b13, b2, copies, *plan_arguments):
    plan = plan_of(*plan_arguments)
    routing = Routing(ids, weights, counts, offs, permutation, inverse)
    y, saved = experts_forward(x, weights, routing, *_forward_operands(x, w13, w2, copies, plan), b13, b2, plan)
    return [y] if plan.recompute else [y, *(saved[name] for name in plan.saved)]


def _experts_backward(dy, saved, x, weights, ids, counts, offs, permutation, inverse, w13, w2, b13, b2, copies, *plan_arguments):
    plan = plan_of(*plan_arguments)
    routing = Routing(ids, weights, counts, offs, permutation, inverse)
    if plan.recompute:
        saved = experts_forward(x, weights, routing, *_forward_operands(x, w13, w2, copies, plan), b13, b2, plan)[1]
    else:
        saved = dict(zip(plan.saved, saved, strict=True))
    operands, like = _dgrad_operands(x, w13, w2, copies, plan), Parameters(w13, w2, b13, b2)
    grads = experts_backward(dy, saved, x, weights, routing, *operands, like, plan)
    return [g for g in grads if g is not None]


def _setup(ctx, inputs, output):
    tensors, plan = inputs[:NUM_TENSORS], inputs[NUM_TENSORS:]
    saved = [] if plan_of(*plan).recompute else output[1:]
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)  # no zeros in the place of gradients of what is saved
    ctx.save_for_backward(*tensors[:-1], *tensors[-1], *saved)
    ctx.num_copies, ctx.plan = len(tensors[-1]), plan


@once_differentiable
def _backward(ctx, grads):
    fixed = NUM_TENSORS - 1
    stored, end = ctx.saved_tensors, fixed + ctx.num_copies
    tensors = (*stored[:fixed], list(stored[fixed:end]))
    made = iter(OPS.experts_backward(grads[0], list(stored[end:]), *tensors, *ctx.plan))
    needs = plan_of(*ctx.plan).needs
    dx, dweights = (next(made) if n else None for n in (needs.x, needs.weights))
    weight_grads = [next(made) if n else None for n in (needs.w13, needs.w2, needs.b13, needs.b2)]
    return dx, dweights, *[None] * 5, *weight_grads, [None] * ctx.num_copies, *[None] * NUM_PLAN


for _name, _body in (("experts", _experts), ("experts_backward", _experts_backward)):
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mxmoe::{_name}", _body, lib=LIBRARY)
torch.library.register_autograd("mxmoe::experts", _backward, setup_context=_setup, lib=LIBRARY)
