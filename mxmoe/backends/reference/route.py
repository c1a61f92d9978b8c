"""The router: from logits (T, E) to expert ids and weights (T, K), and back.

Scores are softmax(logits) or sigmoid(logits) in FP32. An expert is chosen by score + bias (a tie goes to the lower id)
and weighed by its score alone. With groups (DeepSeek-V3) a group counts the sum of its two best score + bias, with or
without a bias, and only experts of the best groups stay. A logit of -Inf masks its expert: it is chosen only when
nothing else is left, lowest id first, and so is an expert outside the kept groups. A NaN or +Inf logit masks its
expert too, and makes every weight of its token NaN.
"""

import torch
from torch import Tensor

from mxmoe.backends.reference.arithmetic import exp, log, mean_tokens, sigmoid, sum_ascending, sum_lanes

EPSILON = 1e-20  # keeps 0 / 0 out of the normalisation when every score underflows


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax, logsumexp (T, 1)) of each row."""
    top = logits.amax(-1, keepdim=True)
    powers = exp(logits - top)
    total = sum_lanes(powers)
    return powers / total, top + log(total)


def _scores(logits: Tensor, score: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(scores, softmax, logsumexp, poisoned (T, 1)); a masked or poisonous expert scores 0."""
    poisonous = logits.isnan() | (logits == torch.inf)
    logits = logits.masked_fill(poisonous, -torch.inf)
    softmax, logsumexp = _softmax(logits)
    scores = softmax if score == "softmax" else sigmoid(logits)
    return scores, softmax, logsumexp, poisonous.any(-1, keepdim=True)


def _selection(logits: Tensor, scores: Tensor, bias: Tensor | None, num_groups: int, groups_kept: int) -> Tensor:
    """The values to choose by: score + bias, -Inf where the expert is masked, NaN where it poisons its token."""
    values = scores if bias is None else scores + bias
    values = values.masked_fill(logits == -torch.inf, -torch.inf).masked_fill(logits == torch.inf, torch.nan)
    values = values.masked_fill(logits.isnan(), torch.nan)
    if num_groups == groups_kept:
        return values
    grouped = values.unflatten(-1, (num_groups, -1))
    best = _descending(grouped)[0][..., :2]
    second = best[..., 1:].masked_fill(best[..., 1:] == -torch.inf, 0.0)  # a group with one expert left counts that one
    kept = _descending((best[..., :1] + second.sum(-1, keepdim=True)).squeeze(-1))[1][:, :groups_kept]
    mask = torch.ones(grouped.shape[:2], dtype=torch.bool, device=values.device).scatter_(1, kept.long(), False)
    return grouped.masked_fill(mask[..., None] & ~grouped.isnan(), -torch.inf).flatten(1)


def _descending(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted values and indices of the last axis: largest first, a tie to the lower index, NaN as -Inf."""
    return values.masked_fill(values.isnan(), -torch.inf).sort(dim=-1, descending=True, stable=True)


def _filter_replay(replay: Tensor, own: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Replaces each replayed expert with score < threshold * (smallest score of the router's own top-k): in slot
    order, by the router's own experts, in rank order, that are neither kept from the replay nor used before."""
    num_experts = scores.shape[-1]
    valid = (replay >= 0) & (replay < num_experts)
    limit = scores.gather(1, own.long()).amin(-1, keepdim=True) * threshold
    implausible = valid & (scores.gather(1, replay.long().clamp(0, num_experts - 1)) < limit)
    present = ((own[:, :, None] == replay[:, None, :]) & (valid & ~implausible)[:, None, :]).any(-1)
    candidates = own.gather(1, present.to(torch.int8).argsort(dim=-1, stable=True))  # those not present first, in rank order
    turn = (implausible.long().cumsum(-1) - 1).clamp(min=0)
    return torch.where(implausible, candidates.gather(1, turn), replay)


def _selected(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of the slots (0 where a slot has no expert) and whether it has one."""
    valid = (ids >= 0) & (ids < scores.shape[-1])
    return scores.gather(1, ids.long().clamp(0, scores.shape[-1] - 1)).masked_fill(~valid, 0.0), valid


def route(logits, bias, replay, top_k, score, num_groups, groups_kept, normalize, scale, replay_threshold,
          ids_out, weights_out, probs_out, z_out):  # fmt: skip
    """ids = top_k(score + bias) | replay;  w = score[ids];  w /= sum(w) + 1e-20 if normalize;  w *= scale

    probs_out: mean over tokens of softmax(logits), or of sigmoid scores / (their sum + 1e-20); z_out: of
    logsumexp(logits)^2. Sums over tokens run in chunks of 256. A NaN in `bias` poisons every token, as a NaN logit
    poisons its own.
    """
    scores, softmax, logsumexp, poisoned = _scores(logits, score)
    values = _selection(logits, scores, bias, num_groups, groups_kept)
    poisoned = poisoned | values.isnan().any(-1, keepdim=True)
    ids = _descending(values)[1][:, :top_k].to(torch.int32)
    if replay is not None:
        own, ids = ids, replay
        if replay_threshold is not None:
            ids = torch.where(poisoned, replay, _filter_replay(replay, own, scores, replay_threshold))
    weights, valid = _selected(scores, ids)
    if normalize:
        weights = weights / (sum_ascending(weights) + EPSILON)
    ids_out.copy_(ids)
    weights_out.copy_((weights * scale).masked_fill(poisoned & valid, torch.nan))
    if probs_out is not None:
        probs = softmax if score == "softmax" else scores / (sum_lanes(scores) + EPSILON)
        probs_out.copy_(mean_tokens(probs.masked_fill(poisoned, torch.nan)))
    if z_out is not None:
        z_out.copy_(mean_tokens((logsumexp * logsumexp).masked_fill(poisoned, torch.nan)))


def sort_by_expert(ids, num_experts, counts_out, offs_out, permutation_out, inverse_out):
    """Counting sort of the slots t * K + k by (expert, slot); slots whose id is outside [0, E) come to no row."""
    keys = ids.flatten().long()
    keys = torch.where((keys >= 0) & (keys < num_experts), keys, num_experts)
    order = keys.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, keys, torch.ones_like(keys, dtype=torch.int32))
    counts_out.copy_(counts[:num_experts])
    offs_out.copy_(counts[:num_experts].cumsum(0))
    has_row = keys[order] < num_experts
    permutation_out.copy_(torch.where(has_row, order, -1))
    rows = torch.where(has_row, torch.arange(len(order), device=ids.device), -1).to(torch.int32)
    inverse_out.copy_(torch.empty_like(rows).scatter_(0, order, rows).view_as(inverse_out))


def route_backward(logits, ids, weights_grad, probs_grad, z_grad, score, normalize, scale, logits_grad_out):
    """Gradient of sum(weights_grad * w) + sum(probs_grad * probs) + z_grad * z; every gradient may be None.

    In terms of a_k = dL/ds_k * s_k, finite even where scores underflow: scale * p_k * (g_k - sum_j g_j p_j) with p = s
    / (sum s + 1e-20) when normalised, else scale * s_k * g_k. softmax: dlogits = scatter(a) - s * sum(a); sigmoid:
    scatter(a * (1 - s)). Order per logit: probs term, + z term, - s * sum(a), + a_k by ascending rank. Rows of
    poisoned tokens are NaN.
    """
    num_tokens = max(logits.shape[0], 1)
    scores, softmax, logsumexp, poisoned = _scores(logits, score)
    grad = torch.zeros_like(logits)
    if probs_grad is not None:
        probs = softmax if score == "softmax" else scores / (sum_lanes(scores) + EPSILON)
        share = probs_grad / num_tokens
        grad = probs * (share - sum_lanes(share * probs))
        if score == "sigmoid":
            grad = grad * (1 - scores)
    if z_grad is not None:
        grad = grad + ((logsumexp * (z_grad * 2)) / num_tokens) * softmax
    if weights_grad is not None:
        selected, valid = _selected(scores, ids)
        if normalize:
            part = selected / (sum_ascending(selected) + EPSILON)
            weights_grad = weights_grad.masked_fill(~valid, 0.0)
            a = (part * (weights_grad - sum_ascending(weights_grad * part))) * scale
        else:
            a = (selected * weights_grad.masked_fill(~valid, 0.0)) * scale
        if score == "softmax":
            grad = grad - scores * sum_ascending(a)
        else:
            a = a * (1 - selected)
        slots = torch.where(valid, ids, logits.shape[-1]).long()  # column E takes what has no expert
        grad = torch.nn.functional.pad(grad, (0, 1))
        for k in range(ids.shape[1]):
            grad.scatter_add_(1, slots[:, k : k + 1], a[:, k : k + 1])
        grad = grad[:, :-1]
    logits_grad_out.copy_(grad.masked_fill(poisoned, torch.nan))
