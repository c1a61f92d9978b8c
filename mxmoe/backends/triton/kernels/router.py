"""What route and route_backward share: scores of a tile of tokens, and sums in the contract's order."""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.numerics import exp, lanes_sum, log, sigmoid

NO_EXPERT: tl.constexpr = tl.constexpr(1 << 20)  # more than any expert's id
EPSILON: tl.constexpr = tl.constexpr(1e-20)


@triton.jit
def sum_lanes(x, BT: tl.constexpr, EP: tl.constexpr):
    """(BT, EP), 0 past the experts -> (BT,): lane j of 32 adds j, j + 32, ... in order, then the tree. A chunk of 32 is singled out
    by a sum whose other terms are 0."""
    chunks: tl.constexpr = EP // 32
    x = tl.reshape(x, (BT, chunks, 32))
    which = tl.arange(0, chunks)[None, :, None]
    lanes = tl.zeros((BT, 32), tl.float32)
    for i in range(chunks):
        lanes += tl.sum(tl.where(which == i, x, 0.0), 1)
    return lanes_sum(lanes, BT)


@triton.jit
def slot(x, k, kk):
    """Column k of (BT, KP), whose columns are numbered kk."""
    return tl.sum(tl.where(kk == k, x, 0), 1)


@triton.jit
def sum_ascending(x, kk, TOP_K: tl.constexpr, BT: tl.constexpr):
    """(BT, KP) -> (BT,): columns below TOP_K, one after the other."""
    total = tl.zeros((BT,), tl.float32)
    for k in range(TOP_K):
        total += slot(x, k, kk)
    return total


@triton.jit
def scores_at(scores, e, ids, kk, TOP_K: tl.constexpr):
    """Scores (BT, EP) of the experts in `ids` (BT, KP), 0 where a slot has no expert."""
    found = tl.zeros(ids.shape, tl.float32)
    for k in range(TOP_K):
        here = e[None, :] == slot(ids, k, kk)[:, None]
        found = tl.where(kk == k, tl.sum(tl.where(here, scores, 0.0), 1)[:, None], found)
    return found


@triton.jit
def scores_of(logits, t, T, E, SIGMOID: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr):
    """Of tokens t: (logits, -Inf past the experts; scores, softmax, 0 past the experts; logsumexp, whether a logit poisons it)."""
    e = tl.arange(0, EP)
    known = (e < E)[None, :]
    raw = tl.load(logits + t.to(tl.int64)[:, None] * E + e[None, :], mask=(t < T)[:, None] & known, other=-float("inf"))
    poisonous = (raw != raw) | (raw == float("inf"))
    clean = tl.where(poisonous, -float("inf"), raw)
    top = tl.max(clean, 1)
    powers = tl.where(known, exp(clean - top[:, None]), 0.0)
    total = sum_lanes(powers, BT, EP)
    softmax = tl.where(known, tl.div_rn(powers, total[:, None]), 0.0)
    scores = softmax
    if SIGMOID:
        scores = tl.where(known, sigmoid(clean), 0.0)
    return raw, scores, softmax, top + log(total), tl.max(poisonous.to(tl.int32), 1) > 0
