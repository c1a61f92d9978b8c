"""Expert parallelism: `dispatch` takes rows to the ranks that hold their experts, `combine` brings the experts' outputs back.

    dispatch: rows = permute(x), each to the rank of its expert; backward: their gradients come back, dx = unpermute(them)
    combine:  the experts' outputs come back, y = unpermute(them, weights); backward: gradients of rows go to their experts

Rank r of R holds experts r * E / R to (r + 1) * E / R, so that what permute makes lies in order of ranks. Every routed row travels
by itself, both ways, and is summed where its token lives, in the single process's order; its experts sort what arrives in the order
(rank, expert, token, slot) by expert. So R ranks give the bytes of one process that has all their tokens in order of ranks: outputs
and gradients of x, of the routing weights and of the experts, complete on their rank. Gradients of what every rank has a copy of
(router, shared expert) are those of its own tokens: sum them over the ranks.

Both are collectives, backwards too: the ranks of the group make the same calls in the same order, with zero tokens as well. Rows
are exchanged as bytes over any backend of torch.distributed that has all_to_all (gloo, NCCL); their numbers are read on the host.
Shape letters: T tokens, D model width, K top-k, E experts of all ranks, R ranks, N = T * K; M rows that arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from mxmoe import backends, ops
from mxmoe.checks import check_choice, check_shape, check_tensor, dtype_name
from mxmoe.formats import FORMATS, MXTensor
from mxmoe.memory import empty
from mxmoe.ops.registration import once_differentiable, refuse_forward_mode
from mxmoe.recipes import Recipe, get_recipe
from mxmoe.routing import Routing

PAYLOADS = ("exact", "mxfp8")


@dataclass(frozen=True, eq=False)
class Exchange:
    """What went where in one dispatch, for the way back: of 2 ranks with experts 0, 1 | 2, 3, this one being rank 0,

    sent (3, 1): it sent the 3 rows of its tokens for experts 0 and 1 to itself, 1 row to rank 1;
    received (3, 2): it has those 3 rows and 2 of rank 1's tokens; `local` sorts the 5 rows by expert 0, 1.
    """

    group: dist.ProcessGroup
    routing: Routing  # of this rank's tokens over the experts of all ranks
    local: Routing  # of the M received rows over this rank's experts: one expert each, with weight 1
    sent: tuple[int, ...]  # rows to each rank
    received: tuple[int, ...]  # rows from each rank
    recipe: Recipe
    backend: str

    @property
    def dtype(self) -> torch.dtype:
        """Of outputs and of gradients on their way."""
        return self.recipe.compute_dtype

    def to_experts(self, rows: Tensor) -> Tensor:
        """(N, C) in expert order, on the ranks of the tokens -> (M, C) on the ranks of the experts."""
        out = empty((sum(self.received), rows.shape[1]), rows.dtype, rows, self.backend)
        self._exchange("dispatch", rows[: sum(self.sent)], out, self.sent, self.received)
        return out

    def to_tokens(self, rows: Tensor) -> Tensor:
        """The inverse: (M, C) -> (N, C); past the last row, where slots without an expert have none, nothing is written."""
        out = empty((self.routing.ids.numel(), rows.shape[1]), rows.dtype, rows, self.backend)
        self._exchange("combine", rows, out[: sum(self.sent)], self.received, self.sent)
        return out

    def _exchange(self, name, rows, out, from_here, to_here):
        rows, out = (t.contiguous().view(torch.uint8) for t in (rows, out))  # gloo knows no 8-bit floats
        with _named_errors(name, self.group):
            dist.all_to_all_single(out, rows, list(to_here), list(from_here), group=self.group)


def dispatch(
    x: Tensor,
    routing: Routing,
    group: dist.ProcessGroup,
    *,
    recipe: str | Recipe = "mxfp8",
    payload: str = "exact",
    also: str = "",
    backend: str = "auto",
) -> tuple[Tensor, Exchange]:
    """(the M rows routed to this rank's experts, from all ranks' tokens; the Exchange that `combine` takes).

    x (T, D) FP32, BF16 or FP16; routing: of these T tokens over the E experts of all ranks. Rows come in the order (rank, expert,
    token, slot), in a dtype that holds x's rows as the recipe's forward reads them. payload "exact": rows travel as they are;
    "mxfp8" (recipe mxfp8 only): as the row copy of their token, half the bytes of BF16: the forward's bytes stay, but the column
    copy that wgrad reads is rounded from the dequantized rows, a second rounding. Differentiable in x (a payload counts as x).
    also: more that all ranks must have in common, in words. Raises TypeError; ValueError, on every rank, where ranks disagree;
    TimeoutError or ConnectionError naming the group where a rank does not come or leaves.
    """
    recipe = get_recipe(recipe)
    check_tensor("x", x, 2)
    check_shape("x", x, (routing.ids.shape[0], x.shape[1]))
    check_choice("payload", payload, PAYLOADS)
    if payload != "exact" and recipe.forward != payload:
        raise ValueError(f"payload {payload!r} needs a recipe that reads it, got recipe {recipe.name!r}")
    check_group(group)
    refuse_forward_mode(x)
    experts = expert_slice(routing.num_experts, group)
    common = (
        f"experts {routing.num_experts}, top_k {routing.ids.shape[1]}, D {x.shape[1]}, dtype {dtype_name(x.dtype)}, "
        f"recipe {recipe.name}, payload {payload}, x needs a gradient {torch.is_grad_enabled() and x.requires_grad}"
    )
    counts = _gather_counts(routing.counts.tolist(), f"{common}, {also}" if also else common, group)
    to_here = [own[experts] for own in counts]
    experts_of_runs = torch.arange(len(to_here[0]), dtype=torch.int32, device="cpu").repeat(len(counts))  # not the default device
    rows_of_runs = torch.tensor(to_here, device="cpu").flatten()
    ids = experts_of_runs.repeat_interleave(rows_of_runs).to(x.device).unsqueeze(1)
    ones = torch.ones(ids.shape, dtype=torch.float32, device=x.device)
    exchange = Exchange(
        group, routing, Routing.from_ids(ids, ones, len(to_here[0]), backend=backend),
        sent=tuple(routing.counts.view(len(counts), -1).sum(1).tolist()), received=tuple(map(sum, to_here)),
        recipe=recipe, backend=backends.resolve(backend, x.device.type),
    )  # fmt: skip
    return _Dispatch.apply(x, exchange, payload), exchange


def combine(rows: Tensor, exchange: Exchange, weights: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """y[t] = sum over k ascending of weights[t, k] * the row of (t, k), in FP32, rounded once to out_dtype (default: rows').

    rows (M, D): the outputs for the rows of `dispatch`, in their order; they travel in the recipe's compute dtype. weights FP32
    (T, K), default 1. -> (T, D). Differentiable in rows and weights. Raises as `dispatch`.
    """
    check_tensor("rows", rows, 2)
    check_shape("rows", rows, (sum(exchange.received), rows.shape[1]))
    refuse_forward_mode(rows, weights)
    return _Combine.apply(rows, weights, exchange, out_dtype or rows.dtype)


def expert_slice(num_experts: int, group: dist.ProcessGroup) -> slice:
    """The experts of this rank: `w13[expert_slice(E, group)]`. ValueError where E is not a multiple of the group's size."""
    check_group(group)
    size, rank = group.size(), group.rank()
    if num_experts % size:
        raise ValueError(f"the number of experts must be a multiple of the group's {size} ranks, got {num_experts}")
    return slice(num_experts // size * rank, num_experts // size * (rank + 1))


def check_group(group: dist.ProcessGroup):
    """A process group that this rank is in."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group must be one that this rank ({dist.get_rank()}) is a member of, got another's")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed ProcessGroup, got {type(group).__name__}")


# ------------------------------------------------------------------------------------------------------------ their derivatives


class _Dispatch(Function):
    @staticmethod
    def forward(ctx, x, exchange: Exchange, payload):
        ctx.exchange, ctx.x_dtype = exchange, x.dtype
        if exchange.recipe.forward not in FORMATS:
            x = x.to(exchange.dtype)
        rows_dtype = torch.promote_types(x.dtype, exchange.dtype)  # of the rows' gradient too, which must lose nothing
        if payload == "exact":
            return exchange.to_experts(ops.permute(x, exchange.routing, backend=exchange.backend)).to(rows_dtype)
        rows = ops.permute(x, exchange.routing, format=payload, backend=exchange.backend)
        values, scales = (exchange.to_experts(t) for t in (rows.values, rows.scales))
        arrived = MXTensor(values, scales, None, payload, "row", (values.shape[0], x.shape[1]))
        return ops.dequantize(arrived, rows_dtype, backend=exchange.backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, rows_grad):
        exchange = ctx.exchange
        rows_grad = exchange.to_tokens(rows_grad.to(exchange.dtype))
        dx = ops.unpermute(rows_grad, exchange.routing, out_dtype=ctx.x_dtype, backend=exchange.backend)
        return dx, None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx, rows, weights, exchange: Exchange, out_dtype):
        ctx.exchange, ctx.rows_dtype = exchange, rows.dtype
        y_rows = exchange.to_tokens(rows.to(exchange.dtype))
        ctx.save_for_backward(weights, y_rows if ctx.needs_input_grad[1] else None)
        return ops.unpermute(y_rows, exchange.routing, weights, out_dtype=out_dtype, backend=exchange.backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        exchange, (weights, y_rows) = ctx.exchange, ctx.saved_tensors
        dy_rows, weights_grad = ops.unpermute_backward(
            dy, exchange.routing, weights, y_rows, rows_dtype=exchange.dtype, backend=exchange.backend
        )
        rows_grad = exchange.to_experts(dy_rows).to(ctx.rows_dtype) if ctx.needs_input_grad[0] else None
        return rows_grad, weights_grad, None, None


# ---------------------------------------------------------------------------------------------------------------- collectives


def _gather_counts(counts: list[int], common: str, group: dist.ProcessGroup) -> list[list[int]]:
    """Every rank's rows for each of the E experts. ValueError, on every rank, where `common` is not the same on all: nothing else
    has been sent then, so that nobody is left waiting."""
    gathered = [None] * group.size()
    with _named_errors("dispatch", group):
        dist.all_gather_object(gathered, (common, counts), group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, (text, _) in zip(ranks, gathered, strict=True):
        if text != gathered[0][0]:
            raise ValueError(f"ranks must agree, got on rank {ranks[0]}: {gathered[0][0]}; on rank {rank}: {text}")
    return [counts for _, counts in gathered]


@contextmanager
def _named_errors(name: str, group: dist.ProcessGroup) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        kind = TimeoutError if "timed out" in str(error).lower() else ConnectionError
        of_group = f"group {group.group_name!r}, ranks {dist.get_process_group_ranks(group)}"
        raise kind(
            f"{name}: rank {dist.get_rank()} waited in vain for others of {of_group}; all must make the same calls, with zero "
            f"tokens too ({str(error).splitlines()[0]})"
        ) from error
