"""route, sort_by_expert, route_backward: from router logits to a `Routing`."""

from __future__ import annotations

import torch
from torch import Tensor

from mxmoe import backends
from mxmoe.checks import check_choice, check_device, check_shape, check_tensor
from mxmoe.ops.registration import LIBRARY, OPS, backend_for, fill_op, once_differentiable, refuse_forward_mode
from mxmoe.routing import Routing

IDS = (torch.int32, torch.int64)


@fill_op(
    "sort_by_expert(Tensor ids, int num_experts, Tensor(a!) counts, Tensor(b!) offs, Tensor(c!) permutation, "
    "Tensor(d!) inverse, str backend)"
)
def _sort_by_expert(ids, num_experts, counts, offs, permutation, inverse, backend):
    backends.get(backend).sort_by_expert(ids, num_experts, counts, offs, permutation, inverse)


@fill_op(
    "route_backward(Tensor logits, Tensor ids, Tensor? weights_grad, Tensor? probs_grad, Tensor? z_grad, str score, "
    "bool normalize, float scale, Tensor(a!) logits_grad, str backend)"
)
def _route_backward(logits, ids, weights_grad, probs_grad, z_grad, score, normalize, scale, logits_grad, backend):
    grads = [None if g is None else g.contiguous() for g in (weights_grad, probs_grad, z_grad)]
    backends.get(backend).route_backward(logits.contiguous(), ids, *grads, score, normalize, scale, logits_grad)


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    groups_kept: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
    replay: Tensor | None = None,
    replay_threshold: float | None = None,
    capacity_factor: None = None,
    backend: str = "auto",
) -> Routing:
    """s = score(logits); ids = top_k of s + bias; weights = s[ids] (/ (sum + 1e-20) when normalize) * scale.

    logits (T, E), computed in FP32; bias FP32 (E,) acts on the selection only. score "softmax" | "sigmoid". num_groups > 1: the
    experts form equal groups, each scored by the sum of its two best s + bias; only groups_kept groups compete. Ties go to the
    lower id. A NaN logit: the best finite experts, all weights NaN. replay (T, K): recorded ids to use instead of the selection;
    with replay_threshold p, a replayed expert whose score is below p * (smallest score of the router's own top-k) is replaced.
    Differentiable in logits through the weights and the loss terms of the Routing. Dropless: a capacity factor is refused.
    Sources: DeepSeek-V3 (arXiv 2412.19437) eq. 12-16; Switch (arXiv 2101.03961) eq. 4.
    """
    if capacity_factor is not None:
        raise ValueError(f"capacity_factor must be None: routing is dropless, no token is ever dropped, got {capacity_factor!r}")
    check_tensor("logits", logits, 2)
    tokens, num_experts = logits.shape
    check_selection(top_k, num_experts, num_groups, groups_kept)
    check_choice("score", score, ("softmax", "sigmoid"))
    if bias is not None:
        check_tensor("bias", bias, 1, (torch.float32,), logits)
        check_shape("bias", bias, (num_experts,))
        bias = bias.detach().contiguous()
    if replay is not None:
        replay = check_ids("replay", replay, logits)
        check_shape("replay", replay, (tokens, top_k))
    elif replay_threshold is not None:
        raise ValueError(f"replay_threshold needs replay, got {replay_threshold} without it")
    refuse_forward_mode(logits)
    name = backend_for(backend, logits, "route", "fp32")
    ids, weights, probs_mean, z = OPS.route(
        logits.float(), bias, replay, top_k, score, num_groups, groups_kept, normalize, scale, replay_threshold, name
    )
    counts, offs, permutation, inverse = _sorted(ids, num_experts, name)
    return Routing(ids, weights, counts, offs, permutation, inverse, probs_mean, z)


def route_backward(
    logits: Tensor,
    routing: Routing,
    weights_grad: Tensor | None = None,
    probs_grad: Tensor | None = None,
    z_grad: Tensor | None = None,
    *,
    score: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """Gradient of `route` with respect to the logits (T, E), FP32; arguments as the forward had them.

    weights_grad (T, K), probs_grad (E,), z_grad (1,): gradients of the Routing's weights, probs_mean and z; None counts as zero.
    """
    check_tensor("logits", logits, 2)
    check_shape("logits", logits, (routing.ids.shape[0], routing.counts.shape[0]))
    check_device("routing", routing, logits)
    check_choice("score", score, ("softmax", "sigmoid"))
    shapes = {"weights_grad": routing.ids.shape, "probs_grad": (logits.shape[1],), "z_grad": (1,)}
    for argument, grad in zip(shapes, (weights_grad, probs_grad, z_grad), strict=True):
        if grad is not None:
            check_tensor(argument, grad, len(shapes[argument]), (torch.float32,), logits)
            check_shape(argument, grad, shapes[argument])
    name = backend_for(backend, logits, "route_backward", "fp32")
    logits_grad = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    ids = routing.ids.contiguous()
    OPS.route_backward(logits.float(), ids, weights_grad, probs_grad, z_grad, score, normalize, scale, logits_grad, name)
    return logits_grad


def sort_by_expert(ids: Tensor, num_experts: int, *, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in stable order of (expert, slot): ids (T, K) -> counts (E,), offs (E,), permutation (N,), inverse (T, K), int32.

    slot = t * K + k; permutation[row] = slot, -1 past the last row; inverse[t, k] = row, -1 where ids is outside [0, E).
    """
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    ids = check_ids("ids", ids)
    return _sorted(ids, num_experts, backend_for(backend, ids, "sort_by_expert", "int32"))


def check_ids(name: str, ids: Tensor, like: Tensor | None = None) -> Tensor:
    """ids (T, K) int32 or int64 -> contiguous int32; 64-bit ids outside int32 mean "no expert" like every other."""
    check_tensor(name, ids, 2, IDS, like)
    return ids.clamp(-1, 2**31 - 1).to(torch.int32).contiguous() if ids.dtype == torch.int64 else ids.contiguous()


def check_selection(top_k: int, num_experts: int, num_groups: int = 1, groups_kept: int = 1):
    """ValueError where so many experts cannot be selected."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be between 1 and the number of experts ({num_experts}), got {top_k}")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups must divide the number of experts ({num_experts}), got {num_groups}")
    if not 1 <= groups_kept <= num_groups:
        raise ValueError(f"groups_kept must be between 1 and num_groups ({num_groups}), got {groups_kept}")
    if top_k > num_experts // num_groups * groups_kept:
        raise ValueError(
            f"top_k must be at most the experts of the kept groups ({num_experts // num_groups * groups_kept}), got {top_k}"
        )


def _sorted(ids, num_experts, name):
    def empty(*shape):
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    out = empty(num_experts), empty(num_experts), empty(ids.numel()), empty(*ids.shape)
    OPS.sort_by_expert(ids, num_experts, *out, name)
    return out


# route is differentiable: one functional op, whose backward is the verb route_backward.
LIBRARY.define(
    "route(Tensor logits, Tensor? bias, Tensor? replay, int top_k, str score, int num_groups, int groups_kept, "
    "bool normalize, float scale, float? replay_threshold, str backend) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _route_outputs(logits, top_k):
    tokens, num_experts = logits.shape
    return (
        torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device),
        torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device),
        torch.empty(num_experts, dtype=torch.float32, device=logits.device),
        torch.empty(1, dtype=torch.float32, device=logits.device),
    )


def _route_functional(logits, bias, replay, top_k, score, num_groups, groups_kept, normalize, scale, threshold, backend):
    out = _route_outputs(logits, top_k)
    backends.get(backend).route(
        logits.contiguous(), bias, replay, top_k, score, num_groups, groups_kept, normalize, scale, threshold, *out
    )
    return out


def _route_setup(ctx, inputs, output):
    logits, _, _, _, score, _, _, normalize, scale, _, backend = inputs
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(logits, output[0])
    ctx.options = (score, normalize, scale, backend)


@once_differentiable
def _route_autograd(ctx, _, weights_grad, probs_grad, z_grad):
    logits, ids = ctx.saved_tensors
    score, normalize, scale, backend = ctx.options
    logits_grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    OPS.route_backward(logits, ids, weights_grad, probs_grad, z_grad, score, normalize, scale, logits_grad, backend)
    return logits_grad, *[None] * 10


LIBRARY.impl("route", _route_functional, "CompositeExplicitAutograd")
torch.library.register_fake("mxmoe::route", lambda logits, b, r, top_k, *rest: _route_outputs(logits, top_k), lib=LIBRARY)
torch.library.register_autograd("mxmoe::route", _route_autograd, setup_context=_route_setup, lib=LIBRARY)
