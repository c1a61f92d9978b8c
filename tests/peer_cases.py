"""Ranks in one process under the interpreter: dispatch and combine against what mxmoe.parallel does, by the reference's verbs."""

import torch

from mxmoe import Routing, ops
from mxmoe.backends.interpreter import peers
from tests.helpers import Backend, assert_same_bits, poisoned

REFERENCE = Backend("reference")


def problem(tokens: tuple[int, ...], top_k: int, experts: int, width: int, dtype):
    """(x of each rank, its routing): some slots have no expert."""
    g = torch.Generator().manual_seed(sum(tokens))
    xs, routings = [], []
    for count in tokens:
        ids = torch.randint(-1, experts, (count, top_k), dtype=torch.int32, generator=g)
        weights = torch.randn(count, top_k, generator=g)
        routings.append(Routing.from_ids(ids, weights, experts, backend="reference"))
        xs.append(torch.randn(count, width, generator=g).to(dtype))
    return xs, routings


def expected(rows_of_ranks: list, routings: list[Routing]) -> list[torch.Tensor]:
    """What each rank's experts get, by expert and then by rank: runs of the ranks' permuted rows."""
    ranks, experts = len(routings), routings[0].num_experts
    runs = [r[: int(g.offs[-1])].split(g.counts.tolist()) for r, g in zip(rows_of_ranks, routings, strict=True)]
    own = experts // ranks
    return [torch.cat([runs[s][e] for e in range(d * own, (d + 1) * own) for s in range(ranks)]) for d in range(ranks)]


def check_exchange(tokens, top_k, experts, width, dtype=torch.bfloat16, payload="exact"):
    xs, routings = problem(tokens, top_k, experts, width, dtype)
    sent = [REFERENCE.quantize(x, "mxfp8", "row") for x in xs] if payload == "mxfp8" else xs
    rows, exchange = peers.dispatch(sent, routings)
    parts = [[x.values.view(torch.uint8), x.scales.view(torch.uint8)] for x in sent] if payload == "mxfp8" else [[x] for x in xs]
    for i in range(len(parts[0])):
        permuted = [p[i][r.permutation[: int(r.offs[-1])] // top_k] for p, r in zip(parts, routings, strict=True)]
        for got, want, offs in zip(rows, expected(permuted, routings), exchange.offs, strict=True):
            assert_same_bits((got[i] if payload == "mxfp8" else got)[: int(offs[-1])], want)
            assert int(offs[-1]) == len(want)
    if payload == "exact" and dtype != torch.float16:
        weights = [r.weights for r in routings]
        ys = peers.combine(rows, exchange, weights, dtype)
        for x, r, y in zip(xs, routings, ys, strict=True):
            assert_same_bits(
                y, ops.unpermute(ops.permute(x, r, backend="reference"), r, r.weights, out_dtype=dtype, backend="reference")
            )


def dispatch_case():
    check_exchange((50, 0, 7, 90), 3, 8, 40)
    check_exchange((33, 20), 2, 4, 50, torch.float32)


def dispatch_mxfp8_case():
    check_exchange((40, 9), 3, 6, 96, payload="mxfp8")


def overlapped_case():
    """combine waits for dispatch's minibatches while both run: the experts are the identity."""
    xs, routings = problem((60, 0, 75), 4, 6, 72, torch.bfloat16)
    exchange, program = peers.Exchange.of(routings), peers.Program()
    scheduled = exchange.add_schedule(program)
    rows = [poisoned((exchange.capacity, 72), torch.bfloat16) for _ in xs]
    landing = [poisoned((r.ids.numel(), 72), torch.bfloat16) for r in routings]
    out = [poisoned(x.shape, torch.bfloat16) for x in xs]
    exchange.add_dispatch(program, scheduled, xs, [], rows, [])
    exchange.add_combine(program, scheduled, rows, landing, [r.weights for r in routings], out, overlapped=True)
    program.run()
    for x, r, y in zip(xs, routings, out, strict=True):
        assert_same_bits(
            y, ops.unpermute(ops.permute(x, r, backend="reference"), r, r.weights, out_dtype=x.dtype, backend="reference")
        )
