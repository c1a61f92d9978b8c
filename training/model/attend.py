"""Causal softmax attention over the sequences of a batch, ordinary and deterministic.

    y = softmax(scale * q . k^T, over the keys a token sees) . v

Letters: B sequences of a group, H query heads, K key heads, n new tokens, L keys, C query and key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mxmoe import ops
from mxmoe.backends.reference.arithmetic import exp
from training.model.sequences import Group, Sequences

QUERIES = 128  # queries of a sequence whose scores are held at once; any number gives the same bytes


class KeysValues(NamedTuple):
    """k (B, K, L, C), v (B, K, L, V)."""

    k: Tensor
    v: Tensor


def attend(
    q_THC: Tensor, keys_values: Callable[[int, Group], KeysValues], sequences: Sequences, scale: float, deterministic: bool
) -> Tensor:
    """(T, H, V); keys_values(i, group) are those of the i-th group of `sequences`."""
    core = Deterministic.apply if deterministic else ordinary
    outputs = []
    for i, (group, q_BnHC) in enumerate(zip(sequences.groups, sequences.split(q_THC), strict=True)):
        y_BHnV = core(q_BnHC.transpose(1, 2), *keys_values(i, group), group, scale)
        outputs.append(y_BHnV.transpose(1, 2))
    return sequences.join(outputs)


def new_keys_values(k_TKC: Tensor, v_TKV: Tensor, sequences: Sequences) -> Callable[[int, Group], KeysValues]:
    """Of sequences that begin with the batch."""
    groups = [[part.transpose(1, 2) for part in sequences.split(t)] for t in (k_TKC, v_TKV)]
    return lambda i, group: KeysValues(groups[0][i], groups[1][i])


def ordinary(q_BHnC: Tensor, k_BKLC: Tensor, v_BKLV: Tensor, group: Group, scale: float) -> Tensor:
    """(B, H, n, V) by torch's fused attention."""
    causal, mask = not any(group.past), None
    if not causal and (group.length > 1 or len(set(group.past)) > 1):
        mask = group.mask(group.span, range(group.length), q_BHnC.device).unsqueeze(1)
    options = dict(attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q_BHnC.shape[1] != k_BKLC.shape[1])
    width, missing = v_BKLV.shape[-1], q_BHnC.shape[-1] - v_BKLV.shape[-1]
    # NOTE: fused kernels for CPUs want values as wide as keys; others write out all scores (96 and 64 wide, 1024 tokens: 77 against
    # 23 ms on 2 cores of a Zen 5).
    v_BKLV = F.pad(v_BKLV, (0, missing)) if missing else v_BKLV
    return F.scaled_dot_product_attention(q_BHnC, k_BKLC, v_BKLV, **options)[..., :width]


class Deterministic(torch.autograd.Function):
    """The same function, a token's bytes independent of the batch: every sum is a grouped_mm's, in ascending order from the
    sequence's first key, one group per sequence and key head; what lies between the products is exact or correctly rounded
    element by element, exp as in docs/numerics.md. Keys that a token does not see add an exact zero. Gradients are those of the
    ordinary attention.
    """

    @staticmethod
    def forward(ctx, q_BHnC, k_BKLC, v_BKLV, group: Group, scale: float) -> Tensor:
        ctx.save_for_backward(q_BHnC, k_BKLC, v_BKLV)
        ctx.group, ctx.scale = group, scale
        chunks = [range(i, min(i + QUERIES, group.length)) for i in range(0, group.length, QUERIES)]
        return torch.cat([_some_queries(q_BHnC, k_BKLC, v_BKLV, queries, group, scale) for queries in chunks], dim=2)

    @staticmethod
    def backward(ctx, dy_BHnV):
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            y_BHnV = ordinary(*inputs, ctx.group, ctx.scale)
        return *torch.autograd.grad(y_BHnV, inputs, dy_BHnV), None, None


def _some_queries(q_BHnC: Tensor, k_BKLC: Tensor, v_BKLV: Tensor, queries: range, group: Group, scale: float) -> Tensor:
    (B, H), K, V = q_BHnC.shape[:2], k_BKLC.shape[1], v_BKLV.shape[-1]
    keys = max(group.past) + queries.stop
    rows = H // K * len(queries)  # of one sequence and key head
    q_NC = q_BHnC[:, :, queries.start : queries.stop].reshape(B * K * rows, -1)
    offs = torch.arange(rows, B * K * rows + 1, rows, dtype=torch.int32, device=q_NC.device)
    scores_NL = _product(q_NC, k_BKLC[:, :, :keys].flatten(0, 1), offs)
    unseen = ~group.mask(keys, queries, q_NC.device)
    scores = scores_NL.mul_(scale).view(B, H, len(queries), keys).masked_fill_(unseen.unsqueeze(1), -torch.inf)
    p_NL = exp(scores - scores.amax(-1, keepdim=True)).view_as(scores_NL)
    total_N1 = _product(p_NL, p_NL.new_ones(1, 1, keys), offs[-1:])
    y_NV = _product(p_NL, v_BKLV[:, :, :keys].flatten(0, 1).transpose(1, 2), offs) / total_N1
    return y_NV.view(B, H, len(queries), V).to(q_BHnC.dtype)


def _product(a_NC: Tensor, b_EOC: Tensor, offs_E: Tensor) -> Tensor:
    return ops.grouped_mm(a_NC, b_EOC, offs_E, in_fp32=True, out_dtype=torch.float32)
