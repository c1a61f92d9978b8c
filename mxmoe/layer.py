"""`moe_layer`: router, experts and shared expert; `moe_experts`: the experts alone; `prepare_experts`: their quantized copies.

    logits = x . router^T (FP32)      routing = route(logits)      y = moe_experts(x, routing) + shared(x)

Shapes: T tokens (any leading shape), D model width, F expert width, G = 2F (gate and up), E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mxmoe import backends, ops
from mxmoe.autograd import operand_fields, plan_arguments
from mxmoe.checks import FLOATS, check_choice, check_shape, check_tensor
from mxmoe.experts import DTYPES, Needs, Operand, Plan, make_operand
from mxmoe.formats import MXTensor, can_panel
from mxmoe.linear import linear
from mxmoe.ops.registration import OPS, refuse_forward_mode
from mxmoe.ops.route import IDS, check_ids
from mxmoe.ops.rows import GATE_UP, flat_rows
from mxmoe.parallel import check_group, combine, dispatch
from mxmoe.recipes import Recipe, SwiGLU, get_recipe
from mxmoe.routing import Routing

Weight = Tensor | MXTensor
ACTIVATIONS = {"swiglu": SwiGLU()}


@dataclass(frozen=True)
class PreparedExperts:
    """Operands of w13 and w2 made ahead by `prepare_experts`: forward (row) copies and, for training, dgrad (column) copies."""

    recipe: str
    w13: Operand
    w2: Operand
    w13_dgrad: Operand | None
    w2_dgrad: Operand | None
    sources: tuple[Tensor, Tensor]  # the weights, held so that no other tensor can come to lie at their address
    versions: tuple[int, int]  # of the sources, counted by torch: a changed source makes the copies stale

    def made_from(self, w13: Tensor, w2: Tensor) -> bool:
        """Whether these are the weights it was made from, unchanged since."""
        return all(
            (s.data_ptr(), s.shape, s.stride(), s.dtype, version) == (w.data_ptr(), w.shape, w.stride(), w.dtype, w._version)
            for s, version, w in zip(self.sources, self.versions, (w13, w2), strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all copies, each storage counted once."""
        tensors = [t for o in (self.w13, self.w2, self.w13_dgrad, self.w2_dgrad) for t in operand_fields(o)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def prepare_experts(
    w13: Tensor, w2: Tensor, recipe: str | Recipe = "mxfp8", *, backward: bool = True, backend: str = "auto"
) -> PreparedExperts:
    """Quantize the experts once, for every call until the weights change: pass the result as `prepared=` (or use it for inference).

    w13 (E, G, D), w2 (E, D, F). backward: also the copies that dgrad reads; without, those of the forward lie in panels
    (`mxmoe.to_panels`) where the backend reads such and the shapes allow it. An optimizer step changes the weights in place; using
    stale copies raises ValueError. Raises as `moe_experts`.
    """
    _check_experts(w13, w2, None, None)
    r = get_recipe(recipe)
    for name, w in (("w13", w13), ("w2", w2)):
        if w.is_inference():
            raise ValueError(f"{name} must not be made in inference mode, where torch does not count changes, got such a tensor")
    with torch.inference_mode(False), torch.no_grad():  # so that copies made in inference mode can serve training
        sources = (w13.detach(), w2.detach())
        forward = [make_operand(w, r.forward, "row", None, backend) for w in sources]
        dgrad = [None, None]
        if backward and r.backward in DTYPES and r.backward == r.forward:
            dgrad = forward
        elif not backward:
            forward = [as_read(o, backend) for o in forward]
        else:
            dgrad = [make_operand(w, r.backward, "column", None, backend) for w in sources]
    return PreparedExperts(r.name, *forward, *dgrad, sources, (w13._version, w2._version))


def as_read(o: Operand, backend: str = "auto") -> Operand:
    """A weight's row copy as the products of its backend read it best: in panels, or as it is."""
    if not isinstance(o, MXTensor) or not can_panel(o.shape):
        return o
    reads = backends.resolve(backend, o.device.type) in backends.READ_PANELS
    return ops.to_panels(o, backend=backend) if reads else o


def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    *,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str | SwiGLU = "swiglu",
    gate_up: str = "concatenated",
    recipe: str | Recipe = "mxfp8",
    prepared: PreparedExperts | None = None,
    recompute: bool = False,
    group: dist.ProcessGroup | None = None,
    payload: str = "exact",
    backend: str = "auto",
) -> Tensor:
    """y[t] = sum over k of weights[t, k] * (w2[e] . act(w13[e] . x[t] + b13[e]) + b2[e]), e = ids[t, k].

    x (..., D) FP32, BF16 or FP16; ids (..., K) int32 or int64, values outside [0, E) mean no expert; weights (..., K), read as
    FP32; w13 (E, G, D) with gate and up rows "concatenated" or "interleaved"; w2 (E, D, F); b13 (E, G), b2 (E, D). -> (..., D) in
    x's dtype (under autocast: its dtype). Differentiable in x, weights, w13, w2, b13, b2; a w13 or w2 given as a row-copy MXTensor
    is frozen. activation: "swiglu" or a `SwiGLU`. recompute: save only the arguments, run the forward again in the backward.
    group: expert parallelism over its R ranks, a collective in both directions: each rank gives its own tokens and E of the R * E
    experts that ids count, rank by rank; payload: "exact" or "mxfp8", see `mxmoe.parallel`. Not traced by torch.compile.
    Raises TypeError / ValueError (argument, expected, got), NotImplementedError where the backend lacks the recipe's format.
    """
    check_tensor("x", x, tuple(range(1, 16)))
    shape = x.shape
    num_experts = _check_experts(w13, w2, b13, b2) * _num_ranks(group)
    width = w13.shape[2]
    if shape[-1] != width:
        raise ValueError(f"x must have w13's {width} columns, got shape {tuple(shape)}")
    check_tensor("ids", ids, x.ndim, IDS, x)
    check_tensor("weights", weights, x.ndim, FLOATS, x)
    check_shape("ids", ids, (*shape[:-1], ids.shape[-1]))
    check_shape("weights", weights, ids.shape)
    ids = check_ids("ids", flat_rows(ids))
    sorted_rows = ops.sort_by_expert(ids, num_experts, backend=backend)
    routing = Routing(ids, flat_rows(weights).float(), *sorted_rows)
    options = _Options(activation, gate_up, recipe, prepared, recompute, group, payload, backend)
    return _experts(flat_rows(x), routing, w13, w2, b13, b2, options).reshape(shape)


@dataclass(frozen=True)
class _Options:
    activation: str | SwiGLU
    gate_up: str
    recipe: str | Recipe
    prepared: PreparedExperts | None
    recompute: bool
    group: dist.ProcessGroup | None
    payload: str
    backend: str


def _experts(x, routing: Routing, w13, w2, b13, b2, options: _Options) -> Tensor:
    """Checked arguments -> y, in x's dtype or autocast's."""
    device = x.device.type
    out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    run = _own_experts if options.group is None else _group_experts
    return run(x, routing, w13, w2, b13, b2, options, out_dtype)


@torch.compiler.disable
def _group_experts(x, routing: Routing, w13, w2, b13, b2, options: _Options, out_dtype: torch.dtype) -> Tensor:
    """Rows go to the ranks of their experts and come back; between, they are tokens with one expert each."""
    trained = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (w13, w2, b13, b2))
    rows, exchange = dispatch(
        x, routing, options.group, recipe=options.recipe, payload=options.payload, also=f"experts need a gradient {trained}",
        backend=options.backend,
    )  # fmt: skip
    y_rows = _own_experts(rows, exchange.local, w13, w2, b13, b2, options, rows.dtype)
    return combine(y_rows, exchange, routing.weights, out_dtype=out_dtype)


def _own_experts(x, routing: Routing, w13, w2, b13, b2, options: _Options, out_dtype: torch.dtype) -> Tensor:
    """Arguments -> the op."""
    check_choice("gate_up", options.gate_up, GATE_UP)
    recipe, activation = get_recipe(options.recipe), options.activation
    if not isinstance(activation, SwiGLU):
        check_choice("activation", activation, tuple(ACTIVATIONS))
        activation = ACTIVATIONS[activation]
    copies, formats = _copies(w13, w2, options.prepared, recipe)
    w13, w2 = (None if isinstance(w, MXTensor) else w for w in (w13, w2))
    arguments = (x, routing.weights, w13, w2, b13, b2)
    refuse_forward_mode(*arguments)
    needs = Needs(*(torch.is_grad_enabled() and t is not None and t.requires_grad for t in arguments))
    plan = Plan(
        recipe, activation, options.gate_up, out_dtype, options.recompute, needs, formats,
        backends.resolve(options.backend, x.device.type),
    )  # fmt: skip
    r = routing
    return OPS.experts(
        x, r.weights, r.ids, r.counts, r.offs, r.permutation, r.inverse, w13, w2, b13, b2, copies, *plan_arguments(plan)
    )[0]


def _copies(w13, w2, prepared: PreparedExperts | None, recipe: Recipe) -> tuple[list[Tensor], tuple[str, ...]]:
    """(tensors, formats) of the operands that exist already: prepared ones, or frozen MXTensors."""
    operands = [w if isinstance(w, MXTensor) else None for w in (w13, w2)] + [None, None]
    if prepared is not None:
        if prepared.recipe != recipe.name:
            raise ValueError(f"prepared must be made for recipe {recipe.name!r}, got {prepared.recipe!r}")
        if any(operands):
            raise ValueError("prepared goes with weights in high precision, got an MXTensor")
        if not prepared.made_from(w13, w2):
            raise ValueError("prepared is stale: w13 or w2 is not, or no longer, what prepare_experts quantized; prepare again")
        operands = [prepared.w13, prepared.w2, prepared.w13_dgrad, prepared.w2_dgrad]
    formats = tuple("" if o is None else o.format if isinstance(o, MXTensor) else _format(o) for o in operands)
    return [t for o in operands for t in operand_fields(o)], formats


def _format(t: Tensor) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == t.dtype)


def _check_experts(w13: Weight, w2: Weight, b13: Tensor | None, b2: Tensor | None) -> int:
    """E, after checking the weights against each other."""
    for name, w in (("w13", w13), ("w2", w2)):
        if isinstance(w, MXTensor):
            if len(w.shape) != 3 or w.axis != "row" or w.scale_layout != "plain":
                raise ValueError(f"{name} must be a 3-D row copy with plain scales when it is an MXTensor, got {w!r}")
        else:
            check_tensor(name, w, 3)
    experts, hidden, width = tuple(w13.shape)
    if hidden % 2 or experts < 1:
        raise ValueError(f"w13 must have shape (E, 2F, D) with E >= 1, got {(experts, hidden, width)}")
    if tuple(w2.shape) != (experts, width, hidden // 2):
        raise ValueError(f"w2 must have shape {(experts, width, hidden // 2)} to go with w13, got {tuple(w2.shape)}")
    for name, b, columns in (("b13", b13, hidden), ("b2", b2, width)):
        if b is not None:
            check_tensor(name, b, 2)
            check_shape(name, b, (experts, columns))
    return experts


def _num_ranks(group: dist.ProcessGroup | None) -> int:
    if group is None:
        return 1
    check_group(group)
    return group.size()


def moe_layer(
    x: Tensor,
    router: Tensor,
    w13: Weight,
    w2: Weight,
    *,
    top_k: int,
    recipe: str | Recipe = "mxfp8",
    score: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    groups_kept: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
    gate_up: str = "concatenated",
    activation: str | SwiGLU = "swiglu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
    shared_recipe: str | Recipe | None = None,
    replay: Tensor | None = None,
    replay_threshold: float | None = None,
    prepared: PreparedExperts | None = None,
    recompute: bool = False,
    capacity_factor: None = None,
    group: dist.ProcessGroup | None = None,
    payload: str = "exact",
    backend: str = "auto",
) -> tuple[Tensor, Routing]:
    """A routed Mixture-of-Experts layer: (y (..., D), Routing).

    x (..., D); router (E, D), whose logits are FP32 and do not depend on the rest of the batch; w13 (E, 2F, D), w2 (E, D, F).
    score ("softmax" | "sigmoid"), bias, num_groups, groups_kept, normalize, scale, replay (..., K), replay_threshold: as
    `mxmoe.ops.route`; others as `moe_experts`. shared: (w13 (2F', D), w2 (D, F')) of an expert that every token passes, computed by
    shared_recipe (default: recipe).
    The Routing's fields are flat over the leading shape; its loss terms are differentiable. Dropless: a capacity factor is refused.
    group: w13, w2, b13, b2 are this rank's experts, of all that router counts; x and the Routing are of this rank's tokens.

        >>> import torch; from mxmoe import moe_layer
        >>> x, router = torch.randn(5, 64), torch.randn(8, 64)
        >>> w13, w2 = torch.randn(8, 64, 64) / 8, torch.randn(8, 64, 32) / 8
        >>> y, routing = moe_layer(x, router, w13, w2, top_k=2, recipe="mxfp8")
        >>> y.shape, int(routing.counts.sum())
        (torch.Size([5, 64]), 10)
    """
    check_tensor("x", x, tuple(range(1, 16)))
    num_experts = _check_experts(w13, w2, b13, b2) * _num_ranks(group)
    width = w13.shape[2]
    if x.shape[-1] != width:
        raise ValueError(f"x must have w13's {width} columns, got shape {tuple(x.shape)}")
    check_tensor("router", router, 2, FLOATS, x)
    check_shape("router", router, (num_experts, width))
    flat = flat_rows(x)
    logits = linear(flat, router, recipe="fp32", out_dtype=torch.float32, backend=backend)
    if replay is not None:
        check_tensor("replay", replay, x.ndim, IDS, x)
        replay = flat_rows(replay)
    routing = ops.route(
        logits, top_k, score=score, bias=bias, num_groups=num_groups, groups_kept=groups_kept, normalize=normalize, scale=scale,
        replay=replay, replay_threshold=replay_threshold, capacity_factor=capacity_factor, backend=backend,
    )  # fmt: skip
    options = _Options(activation, gate_up, recipe, prepared, recompute, group, payload, backend)
    y = _experts(flat, routing, w13, w2, b13, b2, options)
    if shared is not None:
        y = y + _shared_expert(flat, *shared, replace(options, recipe=shared_recipe or recipe))
    return y.reshape(x.shape), routing


def _shared_expert(x: Tensor, w13: Tensor, w2: Tensor, options: _Options) -> Tensor:
    """One expert that every token passes, with weight 1: the same op with E = 1 and rows in place."""
    check_tensor("shared[0]", w13, 2, FLOATS, x)
    check_tensor("shared[1]", w2, 2, FLOATS, x)
    check_shape("shared[0]", w13, (w13.shape[0] // 2 * 2, x.shape[1]))
    check_shape("shared[1]", w2, (x.shape[1], w13.shape[0] // 2))
    tokens = x.shape[0]
    count = torch.full((1,), tokens, dtype=torch.int32, device=x.device)
    rows = torch.arange(tokens, dtype=torch.int32, device=x.device)
    ids = torch.zeros(tokens, 1, dtype=torch.int32, device=x.device)
    routing = Routing(ids, torch.ones(tokens, 1, dtype=torch.float32, device=x.device), count, count, rows, rows.unsqueeze(1))
    options = replace(options, gate_up="concatenated", prepared=None, group=None)
    return _experts(x, routing, w13.unsqueeze(0), w2.unsqueeze(0), None, None, options)
