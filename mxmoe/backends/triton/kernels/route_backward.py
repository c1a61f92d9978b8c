"""route_backward: the gradient of logits, in terms of the reference's docstring, a tile of tokens at a time."""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.router import EPSILON, scores_at, scores_of, slot, sum_ascending, sum_lanes
from mxmoe.backends.triton.kernels.target import Target


@triton.jit
def route_backward_kernel(logits, ids, weights_grad, probs_grad, z_grad, out, T, E, num_tokens, scale, SIGMOID: tl.constexpr,
                          NORMALIZE: tl.constexpr, TOP_K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr,
                          BT: tl.constexpr):  # fmt: skip
    t, e, kk = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, EP), tl.arange(0, KP)[None, :]
    _, scores, softmax, logsumexp, poisoned = scores_of(logits, t, T, E, SIGMOID, BT, EP)
    grad = tl.zeros((BT, EP), tl.float32)
    if probs_grad is not None:
        probs = softmax
        if SIGMOID:
            probs = tl.div_rn(scores, (sum_lanes(scores, BT, EP) + EPSILON)[:, None])
        share = tl.div_rn(tl.load(probs_grad + e, mask=e < E, other=0.0), num_tokens + tl.zeros((EP,), tl.float32))[None, :]
        grad = probs * (share - sum_lanes(share * probs, BT, EP)[:, None])
        if SIGMOID:
            grad *= 1.0 - scores
    if z_grad is not None:
        each = tl.div_rn(logsumexp * (tl.load(z_grad) * 2.0), num_tokens + tl.zeros((BT,), tl.float32))
        grad += each[:, None] * softmax
    if weights_grad is not None:
        at = t.to(tl.int64)[:, None] * TOP_K + kk
        mask = (t < T)[:, None] & (kk < TOP_K)
        expert = tl.load(ids + at, mask=mask, other=-1)
        valid = (expert >= 0) & (expert < E)
        selected = tl.where(valid, scores_at(scores, e, expert, kk, TOP_K), 0.0)
        a = tl.load(weights_grad + at, mask=mask & valid, other=0.0)
        if NORMALIZE:
            part = tl.div_rn(selected, (sum_ascending(selected, kk, TOP_K, BT) + EPSILON)[:, None])
            a = (part * (a - sum_ascending(a * part, kk, TOP_K, BT)[:, None])) * scale
        else:
            a = (selected * a) * scale
        if SIGMOID:
            a *= 1.0 - selected
        else:
            grad -= scores * sum_ascending(a, kk, TOP_K, BT)[:, None]
        for k in range(TOP_K):
            here = e[None, :] == slot(expert, k, kk)[:, None]
            grad = tl.where(here, grad + slot(a, k, kk)[:, None], grad)
    grad = tl.where(poisoned[:, None], float("nan"), grad)
    tl.store(out + t.to(tl.int64)[:, None] * E + e[None, :], grad, mask=(t < T)[:, None] & (e < E)[None, :])


def route_backward(on: Target, logits, ids, weights_grad, probs_grad, z_grad, score, normalize, scale, logits_grad_out):
    tokens, num_experts = logits.shape
    top_k = ids.shape[1]
    c = on.config("route", experts=num_experts)
    on.run(
        route_backward_kernel, (triton.cdiv(tokens, c["BT"]),), logits=logits, ids=ids, weights_grad=weights_grad,
        probs_grad=probs_grad, z_grad=z_grad, out=logits_grad_out, T=tokens, E=num_experts, num_tokens=float(max(tokens, 1)),
        scale=float(scale), SIGMOID=score == "sigmoid", NORMALIZE=normalize, TOP_K=top_k, KP=triton.next_power_of_2(top_k), **c,
    )  # fmt: skip
