"""route: expert ids and weights of a tile of tokens, and the means over tokens that the losses need."""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.router import EPSILON, NO_EXPERT, scores_at, scores_of, slot, sum_ascending, sum_lanes
from mxmoe.backends.triton.kernels.target import Target

CHUNK = 256  # tokens that a sum over tokens adds at a time


@triton.jit
def largest(values, free, e):
    """(BT,) ids of the largest of the values that are free, the lowest of equals."""
    best = tl.max(tl.where(free, values, -float("inf")), 1)
    return tl.min(tl.where(free & (values == best[:, None]), e[None, :], NO_EXPERT), 1)


@triton.jit
def in_kept_groups(values, e, known, groups_kept, group_size, GROUPS: tl.constexpr, GP: tl.constexpr, BT: tl.constexpr):
    """Whether an expert's group is one of the best: by the sum of its two best values, or the one it has."""
    gg = tl.arange(0, GP)
    scores = tl.full((BT, GP), -float("inf"), tl.float32)
    for g in range(GROUPS):
        inside = (e // group_size == g)[None, :] & known
        first = largest(values, inside, e)[:, None]
        best = tl.max(tl.where(inside, values, -float("inf")), 1)
        second = tl.max(tl.where(inside & (e[None, :] != first), values, -float("inf")), 1)
        total = best + tl.where(second == -float("inf"), 0.0, second)
        scores = tl.where(gg[None, :] == g, tl.where(total != total, -float("inf"), total)[:, None], scores)
    free = (gg < GROUPS)[None, :] & (scores == scores)
    kept = known & (e[None, :] < 0)
    for _ in range(groups_kept):
        group = largest(scores, free, gg)[:, None]
        free = free & (gg[None, :] != group)
        kept = kept | (e[None, :] // group_size == group)
    return kept


@triton.jit
def without_implausible(replay, own, own_scores, replay_scores, kk, E, threshold, TOP_K: tl.constexpr):
    """The replayed ids (BT, KP), those that score too low replaced in slot order by the router's own, in rank order, that are
    neither kept nor used."""
    inside = kk < TOP_K
    valid = (replay >= 0) & (replay < E) & inside
    limit = tl.min(tl.where(inside, own_scores, float("inf")), 1) * threshold
    implausible = valid & (replay_scores < limit[:, None])
    staying = (valid & (implausible == 0)).to(tl.int32)
    present = inside & (replay != replay)
    for k in range(TOP_K):
        present = present | ((own == slot(replay, k, kk)[:, None]) & (slot(staying, k, kk)[:, None] > 0))
    absent = ((present == 0) & inside).to(tl.int32)
    rank = tl.where(present, tl.sum(absent, 1)[:, None] + tl.cumsum((present & inside).to(tl.int32), 1), tl.cumsum(absent, 1)) - 1
    turn = tl.cumsum(implausible.to(tl.int32), 1) - 1
    result = replay
    for k in range(TOP_K):
        here = implausible & (turn == slot(rank, k, kk)[:, None])
        result = tl.where(here, slot(own, k, kk)[:, None], result)
    return result


@triton.jit
def route_kernel(logits, bias, replay, ids_out, weights_out, terms, T, E, groups_kept, group_size, scale, threshold,
                 SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr,
                 GP: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    t, e, kk = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, EP), tl.arange(0, KP)[None, :]
    known = (e < E)[None, :] & (t < T)[:, None]
    raw, scores, softmax, logsumexp, poisoned = scores_of(logits, t, T, E, SIGMOID, BT, EP)
    values = scores
    if bias is not None:
        values = scores + tl.load(bias + e, mask=e < E, other=0.0)[None, :]
    values = tl.where(raw == -float("inf"), -float("inf"), values)
    values = tl.where((raw == float("inf")) | (raw != raw), float("nan"), values)
    poisoned = poisoned | (tl.max((values != values).to(tl.int32), 1) > 0)
    values = tl.where((values != values) | (known == 0), -float("inf"), values)
    if GROUPS > 1:
        kept = in_kept_groups(values, e, known, groups_kept, group_size, GROUPS, GP, BT)
        values = tl.where(kept, values, -float("inf"))
    free = known
    ids = tl.full((BT, KP), -1, tl.int32)
    for k in range(TOP_K):
        best = largest(values, free, e)[:, None]
        ids = tl.where(kk == k, best, ids)
        free = free & (e[None, :] != best)
    at = t.to(tl.int64)[:, None] * TOP_K + kk
    mask = (t < T)[:, None] & (kk < TOP_K)
    if replay is not None:
        given = tl.load(replay + at, mask=mask, other=-1)
        if threshold is not None:
            own_scores, given_scores = scores_at(scores, e, ids, kk, TOP_K), scores_at(scores, e, given, kk, TOP_K)
            plausible = without_implausible(given, ids, own_scores, given_scores, kk, E, threshold, TOP_K)
            given = tl.where(poisoned[:, None], given, plausible)
        ids = given
    valid = (ids >= 0) & (ids < E)
    weights = tl.where(valid, scores_at(scores, e, ids, kk, TOP_K), 0.0)
    if NORMALIZE:
        weights = tl.div_rn(weights, (sum_ascending(weights, kk, TOP_K, BT) + EPSILON)[:, None])
    weights = tl.where(poisoned[:, None] & valid, float("nan"), weights * scale)
    tl.store(ids_out + at, ids, mask=mask)
    tl.store(weights_out + at, weights, mask=mask)
    if terms is not None:
        probs = softmax
        if SIGMOID:
            probs = tl.div_rn(scores, (sum_lanes(scores, BT, EP) + EPSILON)[:, None])
        row = terms + t.to(tl.int64) * (E + 1)
        tl.store(row[:, None] + e[None, :], tl.where(poisoned[:, None], float("nan"), probs), mask=known)
        tl.store(row + E, tl.where(poisoned, float("nan"), logsumexp * logsumexp), mask=t < T)


@triton.jit
def sum_rows_kernel(x, out, rows, width, rows_each, divisor, BC: tl.constexpr):
    """Row i of out: the sum of rows_each rows of x from i * rows_each on, in order, divided by `divisor` unless None."""
    first, c = tl.program_id(0) * rows_each, tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BC,), tl.float32)
    at = x + first.to(tl.int64) * width + c
    for _ in range(first, tl.minimum(first + rows_each, rows)):
        total += tl.load(at, mask=c < width, other=0.0)
        at += width
    if divisor is not None:
        total = tl.div_rn(total, divisor + tl.zeros((BC,), tl.float32))
    tl.store(out + tl.program_id(0) * width + c, total, mask=c < width)


def route(on: Target, logits, bias, replay, top_k, score, num_groups, groups_kept, normalize, scale, replay_threshold,
          ids_out, weights_out, probs_out, z_out):  # fmt: skip
    tokens, num_experts = logits.shape
    wanted = probs_out is not None or z_out is not None
    terms = logits.new_empty(tokens, num_experts + 1) if wanted else None
    c = on.config("route", experts=num_experts)
    limited = num_groups != groups_kept
    on.run(
        route_kernel, (triton.cdiv(tokens, c["BT"]),), logits=logits, bias=bias, replay=replay, ids_out=ids_out,
        weights_out=weights_out, terms=terms, T=tokens, E=num_experts, groups_kept=groups_kept,
        group_size=num_experts // num_groups, scale=float(scale), threshold=replay_threshold, SIGMOID=score == "sigmoid",
        NORMALIZE=normalize, TOP_K=top_k, KP=triton.next_power_of_2(top_k), GROUPS=num_groups if limited else 1,
        GP=triton.next_power_of_2(num_groups), **c,
    )  # fmt: skip
    if wanted:
        _means(on, terms, probs_out, z_out)


def _means(on: Target, terms, probs_out, z_out):
    tokens, width = terms.shape
    chunks = triton.cdiv(tokens, CHUNK)
    sums, means = terms.new_empty(chunks, width), terms.new_zeros(1, width)
    columns = triton.cdiv(width, 32)
    if tokens:
        passes = ((terms, sums, tokens, CHUNK, None), (sums, means, chunks, chunks, float(tokens)))
        for x, out, rows, rows_each, divisor in passes:
            on.run(
                sum_rows_kernel, (len(out), columns), x=x, out=out, rows=rows, width=width, rows_each=rows_each, divisor=divisor,
                BC=32, num_warps=1,
            )  # fmt: skip
    if probs_out is not None:
        probs_out.copy_(means[0, :-1])
    if z_out is not None:
        z_out.copy_(means[0, -1:])
