"""moe_decode: the experts for a few tokens, every weight streamed once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mxmoe import backends
from mxmoe.checks import FLOATS, check_choice, check_device, check_out, check_shape, check_tensor
from mxmoe.formats import FORMATS, MXTensor, QuantizeOptions
from mxmoe.ops.gemm import Operand, operand_lines, operand_schema, scale_per_line
from mxmoe.ops.quantize import quantize
from mxmoe.ops.registration import OPS, backend_for, dtype_format, fill_op, unobserved
from mxmoe.ops.route import check_ids
from mxmoe.ops.rows import GATE_UP
from mxmoe.recipes import Recipe, SwiGLU, get_recipe


@fill_op(
    f"moe_decode(Tensor x, str x_format, Tensor ids, Tensor weights, {operand_schema('w13')}, Tensor? b13, "
    f"{operand_schema('w2')}, Tensor? b2, float alpha, float? limit, float offset, bool interleaved, str act_format, "
    "Tensor(a!) out, str backend)"
)
def _moe_decode(x, x_format, ids, weights, w13, s13, g13, f13, b13, w2, s2, g2, f2, b2, alpha, limit, offset, interleaved, act_format, out, backend):  # fmt: skip  # noqa: E501
    backends.get(backend).moe_decode(
        (x, None, None, x_format), ids, weights, (w13, s13, g13, f13), b13, (w2, s2, g2, f2), b2,
        SwiGLU(alpha, limit, offset), interleaved, act_format, QuantizeOptions(), out,
    )  # fmt: skip


def moe_decode(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Operand,
    w2: Operand,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: SwiGLU | None = None,
    gate_up: str = "concatenated",
    recipe: str | Recipe = "mxfp8",
    activations: str = "recipe",
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`moe_experts` for inference on a few tokens: y[t] = sum over k of weights[t, k] * expert ids[t, k] of x[t].

    x (T, D) FP32 or BF16; ids (T, K) int32 or int64; weights FP32 (T, K); w13 (E, G, D), w2 (E, D, F): row-copy MXTensors, or
    tensors (quantized on each call); b13 (E, G), b2 (E, D). activations "recipe": quantized as the recipe's forward does (the
    layer's own bytes); "bf16": kept in BF16, closer to FP32. -> (T, D) in x's dtype. Not differentiable. Raises TypeError,
    ValueError (argument, expected, got).
    """
    options = (recipe, activations, gate_up, activation, backend)
    if unobserved() and type(x) is Tensor and (again := _CHECKED.get(options)) is not None:
        y = torch.empty_like(x) if out is None else out
        if again(x, ids, weights, w13, b13, w2, b2, y):
            return y
    given = (x, ids, weights, w13, b13, w2, b2)
    check_tensor("x", x, 2, (torch.float32, torch.bfloat16))
    check_choice("activations", activations, ("recipe", "bf16"))
    check_choice("gate_up", gate_up, GATE_UP)
    r = get_recipe(recipe)
    ids = check_ids("ids", ids, x)
    check_shape("ids", ids, (x.shape[0], ids.shape[1]))
    check_tensor("weights", weights, 2, (torch.float32,), x)
    check_shape("weights", weights, tuple(ids.shape))
    w13, w2 = (_weight(name, w, r, backend) for name, w in (("w13", w13), ("w2", w2)))
    (experts, hidden, width), f13 = operand_lines("w13", w13, 3, backend)
    w2_shape, f2 = operand_lines("w2", w2, 3, backend)
    check_device("w13", w13, x)
    check_device("w2", w2, x)
    if x.shape[1] != width:
        raise ValueError(f"x must have w13's {width} columns, got {x.shape[1]}")
    if hidden % 2 or w2_shape != (experts, width, hidden // 2):
        raise ValueError(f"w2 must have shape {(experts, width, hidden // 2)} to go with w13, got {w2_shape}")
    biases = [_bias(name, b, (experts, columns), x) for name, b, columns in (("b13", b13, hidden), ("b2", b2, width))]
    f13[2], f2[2] = scale_per_line(w13, f13[2], (experts, hidden)), scale_per_line(w2, f2[2], (experts, width))
    act_format = r.forward if activations == "recipe" else "bf16"
    source = x if act_format in FORMATS else _as(x, torch.float32 if act_format == "fp32" else torch.bfloat16)
    name = backend_for(backend, x, "moe_decode", f13[3])
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        check_out("out", out, tuple(x.shape), x.dtype, x)
    a, interleaved = activation or SwiGLU(), gate_up == "interleaved"
    OPS.moe_decode.default(
        source, dtype_format(source), ids, weights, *f13, biases[0], *f2, biases[1], a.alpha, a.limit, a.offset, interleaved,
        act_format, out, name,
    )  # fmt: skip
    if name == "host" and unobserved():
        read = (source, given[1], weights, w13, biases[0], w2, biases[1])  # the core takes ids of 64 bits as well
        as_given = all(a is b for a, b in zip(read, given, strict=True)) and all(_per_line(w) for w in (w13, w2))
        check = backends.get(name).checked_decode
        _CHECKED[options] = check(*read, (f13[3], f2[3]), a, interleaved, act_format, out) if as_given else None
    return out


# Of the last checked call with these (recipe, activations, gate_up, activation, backend), the backend's form of it that checks
# no more: memory streamed through the caches leaves nothing of the interpreter in them, and checks take 200 us then.
_CHECKED: dict[tuple, Callable[..., bool] | None] = {}


def _per_line(w: Operand) -> bool:
    """Whether the parts of an MXTensor are what the backend reads."""
    return not isinstance(w, MXTensor) or (w.axis, w.scale_layout, w.scope) == ("row", "plain", "row")


def _bias(name: str, b: Tensor | None, shape: tuple[int, int], like: Tensor) -> Tensor | None:
    if b is None:
        return None
    check_tensor(name, b, 2, FLOATS, like)
    check_shape(name, b, shape)
    return b.float().contiguous()


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == dtype else t.to(dtype)  # what need not be converted is not worth a call: decoding counts microseconds


def _weight(name: str, w: Operand, recipe: Recipe, backend: str) -> Operand:
    """A weight as the recipe's forward reads it."""
    if isinstance(w, MXTensor):
        return w
    check_tensor(name, w, 3)
    if recipe.forward in FORMATS:
        return quantize(w, recipe.forward, "row", backend=backend)
    return _as(w, recipe.compute_dtype)
