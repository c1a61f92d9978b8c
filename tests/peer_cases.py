"""Ranks in one process under the interpreter: dispatch and combine against what mxmoe.parallel does, by the reference's verbs."""

import torch
from torch import Tensor

from mxmoe import Routing, ops
from mxmoe.backends.interpreter import peers, running
from tests.helpers import Backend, assert_same_bits, poisoned

REFERENCE, INTERPRETER = Backend("reference"), Backend("interpreter")


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


def expected(rows_of_ranks: list, routings: list[Routing]) -> list[Tensor]:
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
        assert_identity(xs, peers.combine(rows, exchange, weights, dtype), [r.ids for r in routings], weights, experts)


def exchange_case():
    check_exchange((50, 0, 7, 90), 3, 8, 40)
    check_exchange((33, 20), 2, 4, 50, torch.float32)


def mxfp8_case():
    check_exchange((40, 9), 3, 6, 96, payload="mxfp8")


def outputs(xs, routings: list[Routing]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(rows, landing buffers, y) of the ranks."""
    capacity, width = sum(r.ids.numel() for r in routings), xs[0].shape[1]
    shapes = [(capacity, r.ids.numel(), r.ids.shape[0]) for r in routings]
    return tuple([poisoned((n, width), xs[0].dtype) for n in sizes] for sizes in zip(*shapes, strict=True))


def assert_identity(xs, ys, ids, weights, experts: int):
    """ys are what experts make that give their rows back."""
    for x, y, i, w in zip(xs, ys, ids, weights, strict=True):
        r = Routing.from_ids(i, w, experts, backend="reference")
        rows = ops.permute(x, r, backend="reference")
        assert_same_bits(y, ops.unpermute(rows, r, w, out_dtype=x.dtype, backend="reference"))


def overlapped_case():
    """combine waits for dispatch's minibatches while both run. Rank 0 gets 128 + 1 rows, so that one row is a whole minibatch."""
    xs, routings = problem((57, 0, 55), 4, 9, 72, torch.bfloat16)
    exchange, program = peers.Exchange.of(routings), peers.Program()
    scheduled = exchange.add_schedule(program)
    rows, landing, ys = outputs(xs, routings)
    weights = [r.weights for r in routings]
    exchange.add_dispatch(program, scheduled, xs, [], rows, [])
    exchange.add_combine(program, scheduled, rows, landing, weights, ys, overlapped=True)
    program.run()
    assert_identity(xs, ys, [r.ids for r in routings], weights, 9)


def steps_case():
    """Two steps one after the other in the same memory, each sorted on its rank: nobody may be overtaken. In the first step nobody
    has rows for rank 1, whose last word to the others is that it has read their offsets."""
    experts, width, top_k = 40, 24, 2
    xs, routings = problem((133, 150), top_k, experts, width, torch.bfloat16)
    ids = [[r.ids for r in routings], [r.ids.flip(0) for r in routings]]
    for t in ids[0]:
        t[t >= experts // 2] = -1
    exchange, (rows, landing, _) = peers.Exchange.of(routings), outputs(xs, routings)
    run_counts = [poisoned((2, experts + 1), torch.int32) for _ in xs]
    for r in routings:
        for t in (r.counts, r.offs, r.permutation, r.inverse):
            t.fill_(0x7F7F7F7F)
    program, after, weights, ys = peers.Program(), [-1, -1], [r.weights for r in routings], []
    for step in ids:
        after = [
            program.launch(i, after[i], "sort_by_expert", step[i], run_counts[i], r.counts, r.offs, r.permutation, r.inverse)
            for i, r in enumerate(routings)
        ]
        ys.append(outputs(xs, routings)[2])
        after = exchange.add_schedule(program, after)
        after = exchange.add_dispatch(program, after, xs, [], rows, [])
        after = exchange.add_combine(program, after, rows, landing, weights, ys[-1], overlapped=False)
    program.run()
    for step, y in zip(ids, ys, strict=True):
        assert_identity(xs, y, step, weights, experts)
    for r, i in zip(routings, ids[-1], strict=True):
        assert_same_bits(r.counts, Routing.from_ids(i, r.weights, experts, backend="reference").counts)


def check_grouped_mm(tokens: tuple[int, ...], arch: str):
    """grouped_mm begins while its rows arrive."""
    xs, routings = problem(tokens, 2, 6, 64, torch.bfloat16)
    exchange, program = peers.Exchange.of(routings), peers.Program()
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(2, 64, 64, generator=g).bfloat16() for _ in xs]
    rows = outputs(xs, routings)[0]
    products, want = ([torch.zeros_like(r) for r in rows] for _ in range(2))
    with running(arch=arch):
        scheduled = exchange.add_schedule(program)
        exchange.add_dispatch(program, scheduled, xs, [], rows, [])
        exchange.add_grouped_mm(program, scheduled, rows, weights, products)
        program.run()
        permuted = expected([ops.permute(x, r, backend="reference") for x, r in zip(xs, routings, strict=True)], routings)
        for arrived, w, offs, product, out in zip(permuted, weights, exchange.offs, products, want, strict=True):
            if len(arrived):
                a, b = ((t, None, None, "bf16") for t in (arrived, w))
                INTERPRETER.run("grouped_mm", a, b, offs, None, out[: len(arrived)])
            assert_same_bits(product, out)


def grouped_mm_case(arch: str = "sm_100", tokens: tuple[int, ...] = (70, 0, 55)):
    """Also with a rank that gets a single row."""

    def case():
        check_grouped_mm(tokens, arch)
        check_grouped_mm((2, 0, 1), arch)

    return case


# As the CASES of tests/interpreter_cases.py, of kernels that need several devices.
CASES = {
    "exchange": exchange_case,
    "exchange-mxfp8": mxfp8_case,
    "exchange-overlapped": overlapped_case,
    "exchange-steps": steps_case,
}


def every_case():
    """What one of them leaves out another one waits for."""
    for case in CASES.values():
        case()


# Likewise, but of the instructions of other kernels than the exchange's only these.
OVERLAPPED = {
    "exchange-grouped_mm": grouped_mm_case(),
    "exchange-grouped_mm-pair": grouped_mm_case(tokens=(310, 330, 0)),
    "exchange-grouped_mm-sm_90": grouped_mm_case("sm_90"),
}
OVERLAPPED_OPS = ("wait.acquire.sys", "fence.proxy.async.global")
