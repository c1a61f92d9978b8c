"""The layer as straight-line PyTorch, a loop over the experts: the truth, and the floor that errors are compared with.

`expert_layer(case, ids, recipe)` computes y and every gradient for routing ids taken from the layer under test (so that ties do
not matter). recipe None: the truth, in FP64, no rounding anywhere. A recipe with a quantized format: the *floor*, which rounds GEMM
operands with the reference backend where the recipe says, h, a and dy_row to BF16 where docs/numerics.md says, and computes in
FP32 otherwise. "bf16": what plain PyTorch gets in BF16. "fp32": FP32 throughout, every product summed as docs/numerics.md says, in
order into one accumulator (a BLAS keeps many, which errs less). Errors are relative, |got - truth| / |truth| over a
tensor; a result of the layer may err by MARGIN times the floor.

Shapes as in mxmoe.ops: T tokens, D model width, F expert width, G = 2F, E experts, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import mxmoe
from mxmoe.recipes import RECIPES, SwiGLU

FP32_FLOOR = 2.0**-20  # relative error of one FP32 accumulator over the contractions of small cases
MARGIN = 1.5
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """Arguments of one call of the layer. With `weights` (T, K) it is `moe_experts`, else `moe_layer`."""

    x: Tensor  # (T, D)
    w13: Tensor  # (E, G, D)
    w2: Tensor  # (E, D, F)
    dy: Tensor  # (T, D): gradient of y
    router: Tensor | None = None  # (E, D)
    weights: Tensor | None = None
    b13: Tensor | None = None
    b2: Tensor | None = None
    shared_w13: Tensor | None = None  # (2F', D)
    shared_w2: Tensor | None = None
    activation: SwiGLU = field(default_factory=SwiGLU)
    gate_up: str = "concatenated"
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0

    def leaves(self, dtype: torch.dtype | None = None) -> tuple[Case, dict[str, Tensor]]:
        """The case with fresh differentiable tensors, and those by name; `dtype` None keeps each tensor's own."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        tensors = {name: t.detach().clone().to(dtype or t.dtype) for name, t in tensors.items()}
        made = {name: t.requires_grad_() for name, t in tensors.items() if name != "dy"}
        return replace(self, **tensors), made

    def to(self, dtype: torch.dtype) -> Case:
        """The same, differentiably, in one dtype."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: t.to(dtype) for name, t in tensors.items()})

    def draws(self, tokens: int, seed: int = 0) -> Iterator[Case]:
        """The case, and again with other x and dy until some `tokens` tokens have been seen: the error of one token's dot product
        is a coin, the pooled error of many is a measurement."""
        yield self
        g = torch.Generator().manual_seed(seed)
        for _ in range(min(64, tokens // self.x.shape[0])):
            x, dy = (torch.randn(t.shape, generator=g).to(t.dtype) for t in (self.x, self.dy))
            x[:, :2] *= 20
            yield replace(self, x=x, dy=dy)


def random_case(
    seed: int, *, dtype: torch.dtype | None = None, least_tokens: int = 1, max_tokens: int = 100, experts_only: bool = False
):
    """(case, options for moe_layer or ids for moe_experts) of random shapes, options and routing: few or many tokens, tails of
    blocks, experts without tokens, all tokens on a few experts. `dtype`: of all tensors; None: FP32 or BF16 by chance."""
    g = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=g))]

    def normal(*shape, std=1.0):
        return (torch.randn(*shape, generator=g) * std).to(dtype)

    dtype = dtype or pick(torch.float32, BF16)
    tokens = least_tokens + int(torch.randint(max_tokens, (1,), generator=g) * torch.rand(1, generator=g))
    width, hidden, num_experts = pick(32, 48, 64, 96, 200), pick(16, 32, 40, 64, 72), pick(2, 4, 8, 16)
    top_k = min(pick(1, 2, 4), num_experts)
    biased, shared, skewed = pick(True, False), pick(True, False), pick(True, False)
    router = normal(num_experts, width)
    x = normal(tokens, width)
    x[:, :2] *= 20  # features with outliers, as activations have
    case = Case(
        x=x, dy=normal(tokens, width),
        w13=normal(num_experts, 2 * hidden, width, std=width**-0.5), w2=normal(num_experts, width, hidden, std=hidden**-0.5),
        b13=normal(num_experts, 2 * hidden, std=0.1) if biased else None,
        b2=normal(num_experts, width, std=0.1) if biased else None,
        activation=pick(SwiGLU(), SwiGLU(), SwiGLU(1.702, 7.0, 1.0)), gate_up=pick("concatenated", "interleaved"),
        score=pick("softmax", "sigmoid"), normalize=top_k > 1 and pick(True, False), scale=pick(1.0, 2.5),
    )  # fmt: skip
    selection = torch.where(torch.arange(num_experts) < top_k, 100.0, 0.0) if skewed and pick(True, False) else None
    if experts_only:
        ids = torch.stack([torch.randperm(num_experts, generator=g)[:top_k] for _ in range(tokens)]).int()
        if skewed:
            ids[::3, 0] = -1  # slots without an expert
        return replace(case, weights=torch.rand(tokens, top_k, generator=g)), ids
    if shared:
        case = replace(case, shared_w13=normal(2 * hidden, width, std=width**-0.5))
        case = replace(case, shared_w2=normal(width, hidden, std=hidden**-0.5))
    return replace(case, router=router * width**-0.5), {"top_k": top_k, "bias": selection}


def run_layer(case: Case, options, recipe: str, backend: str = "auto") -> tuple[dict[str, Tensor], Tensor]:
    """({"y": y, gradient by argument name}, ids) of the library's layer; `options` as `random_case` gives them."""
    case, leaves = case.leaves()
    same = dict(b13=case.b13, b2=case.b2, activation=case.activation, gate_up=case.gate_up, recipe=recipe, backend=backend)
    if case.weights is not None:
        ids = options
        y = mxmoe.moe_experts(case.x, ids, case.weights, case.w13, case.w2, **same)
    else:
        shared = None if case.shared_w13 is None else (case.shared_w13, case.shared_w2)
        routed = dict(score=case.score, normalize=case.normalize, scale=case.scale, shared=shared, **options)
        y, routing = mxmoe.moe_layer(case.x, case.router, case.w13, case.w2, **routed, **same)
        ids = routing.ids
    return _results(y, case.dy, leaves), ids


def expert_layer(case: Case, ids: Tensor, recipe: str | None = None) -> dict[str, Tensor]:
    """{"y": y, gradient by argument name}: the truth (recipe None), or the straight-line program of a recipe."""
    wide = torch.float64 if recipe is None else torch.float32
    leaves_case, leaves = case.leaves(wide if recipe is None else None)
    case = leaves_case.to(wide)  # experts, router and shared expert each read the arguments and round their gradients on their own
    quantized = recipe is not None and RECIPES[recipe].backward in mxmoe.formats.FORMATS
    linear = _in_order if recipe == "fp32" else F.linear
    plain = _bf16_expert if recipe == "bf16" else partial(_expert, linear)
    expert = _rounded_expert(recipe) if quantized else plain
    weights = routing_weights(leaves_case.to(wide), ids, linear) if case.weights is None else case.weights
    y = torch.zeros_like(case.x)
    if recipe == "bf16":
        y, weights = y.to(BF16), weights.to(BF16)
    for e in range(case.w13.shape[0]):
        token, slot = torch.where(ids == e)
        biases = [None if b is None else b[e] for b in (case.b13, case.b2)]
        rows = expert(case.x[token], case.w13[e], case.w2[e], *biases, case.activation, case.gate_up)
        y = y.index_add(0, token, rows * weights[token, slot].unsqueeze(1))
    if case.shared_w13 is not None:
        case = leaves_case.to(wide)
        y = y + expert(case.x, case.shared_w13, case.shared_w2, None, None, case.activation, "concatenated")
    return _results(y, case.dy.to(y.dtype), leaves)


def routing_weights(case: Case, ids: Tensor, linear=F.linear) -> Tensor:
    """Weights (T, K) of the given experts, differentiable in x and router."""
    logits = linear(case.x, case.router)
    scores = logits.softmax(1) if case.score == "softmax" else logits.sigmoid()
    weights = scores.gather(1, ids.long())
    if case.normalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * case.scale


def worst_ratio(case: Case, options, recipe: str, backend: str = "auto", tokens: int = 64) -> tuple[float, str]:
    """(largest error / floor over y and all gradients, its name) of the library's layer on one case; MARGIN is allowed.

    Errors are |got - truth| / |truth|, pooled over draws of `tokens` tokens; infinite where a result is zero and should
    not be, or is not finite. The floor's results are given in the dtype that the layer gives its own in: the argument's, y in x's.
    """
    pools = {"got": {}, "floor": {}, "truth": {}}
    for drawn in case.draws(tokens):
        got, ids = run_layer(drawn, options, recipe, backend)
        truth, floor = expert_layer(drawn, ids), expert_layer(drawn, ids, recipe)
        for name in truth:
            given = floor[name].to(getattr(case, "x" if name == "y" else name).dtype)
            for pool, squares in (("got", _squares(got[name], truth[name])), ("floor", _squares(given, truth[name])),
                                  ("truth", float(truth[name].square().sum()))):  # fmt: skip
                pools[pool][name] = pools[pool].get(name, 0.0) + squares
    ratios = []
    for name, size in pools["truth"].items():
        error, floor = (math.sqrt(pools[pool][name] / size) if size else pools[pool][name] for pool in ("got", "floor"))
        ratios.append((error / max(floor, FP32_FLOOR), name))
    return max(ratios)


def _squares(got: Tensor, truth: Tensor) -> float:
    """Sum of squared differences; infinite for a result that is zero and should not be, or is not finite."""
    assert got.shape == truth.shape, (got.shape, truth.shape)
    ok = bool(got.isfinite().all()) and bool(got.any()) == bool(truth.any())
    return float((got.double() - truth.double()).square().sum()) if ok else math.inf


def _results(y: Tensor, dy: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


# ------------------------------------------------------------------------------------------------------- one expert's rows


def _act(h: Tensor, activation: SwiGLU, gate_up: str) -> Tensor:
    gate, up = h.chunk(2, -1) if gate_up == "concatenated" else (h[..., ::2], h[..., 1::2])
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    silu = F.silu(gate) if activation.alpha == 1 else gate * torch.sigmoid(activation.alpha * gate)
    return silu * (up + activation.offset if activation.offset else up)


def _expert(linear, x, w13, w2, b13, b2, activation, gate_up):
    h = linear(x, w13, b13)
    return linear(_act(h, activation, gate_up), w2, b2)


def _in_order(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _InOrder.apply(x, w)
    return y if bias is None else y + bias


class _InOrder(torch.autograd.Function):
    """x . w^T and its gradients, each sum in order into one accumulator."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return _product_in_order(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return _product_in_order(dy, w.T), _product_in_order(dy.T, x.T)


def _product_in_order(a: Tensor, b: Tensor) -> Tensor:
    """a (M, C) . b (N, C)^T"""
    total = a.new_zeros(a.shape[0], b.shape[0])
    for column_a, column_b in zip(a.T, b.T, strict=True):
        total += torch.outer(column_a, column_b)
    return total


def _bf16_expert(x, w13, w2, b13, b2, activation, gate_up):
    return _expert(F.linear, *(None if t is None else t.to(BF16) for t in (x, w13, w2, b13, b2)), activation, gate_up)


def _rounded_expert(recipe: str):
    r = RECIPES[recipe]

    def expert(x, w13, w2, b13, b2, activation, gate_up):
        h = _Linear.apply(x, w13, r.forward, r.backward)
        h = _RoundValue.apply(h if b13 is None else h + b13)
        a = _RoundValue.apply(_act(h, activation, gate_up))
        y = _Linear.apply(a, w2, r.forward, r.backward)
        return _RoundGradient.apply(y if b2 is None else y + b2)

    return expert


def rounded(x: Tensor, format: str, axis: str) -> Tensor:
    """`x` (R, L) through one copy of the format and back, in FP32."""
    scope = "row" if axis == "row" else "tensor"
    return mxmoe.quantize(x, format, axis, scope=scope, backend="reference").dequantize(backend="reference")


class _Linear(torch.autograd.Function):
    """x . w^T whose three GEMMs read rounded operands."""

    @staticmethod
    def forward(ctx, x, w, forward_format, backward_format):
        ctx.save_for_backward(x, w)
        ctx.format = backward_format
        return rounded(x, forward_format, "row") @ rounded(w, forward_format, "row").T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = rounded(dy, ctx.format, "row") @ rounded(w, ctx.format, "column")
        dw = rounded(dy, ctx.format, "column").T @ rounded(x, ctx.format, "column")
        return dx, dw, None, None


class _RoundValue(torch.autograd.Function):
    """BF16 value, gradient passed on."""

    @staticmethod
    def forward(ctx, x):
        return x.to(BF16).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


class _RoundGradient(torch.autograd.Function):
    """Value passed on, BF16 gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(BF16).to(grad.dtype)
