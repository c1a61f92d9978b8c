"""dispatch and combine between ranks that reach each other's memory, all of them in one process (csrc/cuda/kernels/peers.h).

    schedule: from all ranks' offsets, which rows each rank's experts get: made on the devices, nothing is read on the host
    dispatch: each rank pulls the rows of its experts, in BF16 (or any dtype) or as MXFP8 values and scales
    combine:  each rank pushes its experts' outputs into the memory of their tokens' ranks, then each sums its tokens

Rows lie by expert, then rank and slot: as `permute` sorts, by `exchange.local`, what mxmoe.parallel.dispatch brings.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mxmoe.backends.device.gemm import MX8, grouped_mm
from mxmoe.backends.interpreter import extension
from mxmoe.backends.interpreter.extension import LAUNCHER, launch, running
from mxmoe.checks import FLOATS, check_choice, check_shape, check_tensor
from mxmoe.formats import MXTensor
from mxmoe.routing import Routing

MAX_RANKS, MAX_EXPERTS = 8, 4096  # as peers.h has them
MINIBATCH = 128  # rows that dispatch announces together


class Program:
    """Launches on several devices that run together, when `run` does."""

    def __init__(self):
        self.program = extension._interp.Program()

    def add(self, device: int, after: int, verb: Callable, *args) -> int:
        """The number of the verb's last launch; its first begins when launch `after` (-1: none) is over. Tensors must live until
        `run`."""
        self.program.device, self.program.after = device, after
        with running(program=self.program):
            verb(*args)
        return self.program.num_launches - 1

    def launch(self, device: int, after: int, name: str, *args) -> int:
        return self.add(device, after, launch, name, *args)

    def run(self):
        run = extension._run.get() or extension.Run()
        run.sites += self.program.run(run.seed, run.num_sms, run.site, run.mutant)


@dataclass
class Exchange:
    """What the ranks share, one element of each list per rank."""

    routings: list[Routing]  # of each rank's own tokens over all experts
    signals: list[Tensor]
    starts: list[Tensor]
    sources: list[Tensor]
    arrived: list[Tensor]  # rows of each minibatch that are there
    offs: list[Tensor]  # (E / R,): ends of the groups of each rank's own experts
    epoch: int = 0

    @classmethod
    def of(cls, routings: list[Routing]) -> "Exchange":
        """ValueError for routings over different experts or top-k, none or more than MAX_RANKS of them, more than MAX_EXPERTS
        experts, or experts that the ranks cannot share out."""
        kinds = [(r.num_experts, r.ids.shape[1]) for r in routings]
        if len(set(kinds)) != 1:
            raise ValueError(f"routings must be of one number of experts and one top-k, got {kinds}")
        ranks, experts = len(routings), routings[0].num_experts
        if ranks > MAX_RANKS or experts > MAX_EXPERTS or experts % ranks:
            raise ValueError(
                f"an exchange has at most {MAX_RANKS} ranks, {MAX_EXPERTS} experts, a multiple of the ranks; got {ranks}, {experts}"
            )

        def ints(size):
            return [_poisoned(size, torch.int32) for _ in range(ranks)]

        minibatches = -(-sum(r.ids.numel() for r in routings) // MINIBATCH) or 1
        signals = ints(MAX_RANKS + 1)
        for t in signals:
            t[:MAX_RANKS] = 0  # epochs that the others have begun
        return cls(routings, signals, ints(experts + 1), ints(experts), ints(minibatches), ints(experts // ranks))

    @property
    def capacity(self) -> int:
        """Rows that one rank may get: their number is known on the devices only."""
        return sum(r.ids.numel() for r in self.routings)

    def add_schedule(self, program: Program, after: list[int] | None = None) -> list[int]:
        self.epoch += 1
        offs, after = [r.offs for r in self.routings], after or [-1] * len(self.routings)
        return [
            program.launch(
                rank, after[rank], "exchange_schedule", offs, self.signals, self.arrived[rank], rank, self.epoch,
                self.starts[rank], self.sources[rank], self.offs[rank],
            )
            for rank in range(len(self.routings))
        ]  # fmt: skip

    def add_dispatch(self, program: Program, after: list[int], rows: list[Tensor], more: list[Tensor], out, more_out) -> list[int]:
        permutations = [r.permutation for r in self.routings]
        top_k = self.routings[0].ids.shape[1]
        return [
            program.launch(
                rank, after[rank], "dispatch", self.starts[rank], self.sources[rank], permutations, top_k, rows, more, MINIBATCH,
                self.arrived[rank], out[rank], more_out[rank] if more_out else None,
            )
            for rank in range(len(self.routings))
        ]  # fmt: skip

    def add_grouped_mm(self, program: Program, after: list[int], rows, weights: list[Tensor], out) -> list[int]:
        """out = rows . weights^T of each rank's experts, weights (E / R, O, D), BF16; rows are waited for."""
        return [
            program.add(
                rank, after[rank], grouped_mm, LAUNCHER, (rows[rank], None, None, "bf16"), (w, None, None, "bf16"), self.offs[rank],
                None, out[rank], self.arrived[rank], MINIBATCH,
            )
            for rank, w in enumerate(weights)
        ]  # fmt: skip

    def add_combine(self, program: Program, after, rows, landing, weights, out, overlapped: bool) -> list[int]:
        """overlapped: each minibatch is waited for."""
        return [
            program.launch(
                rank, after[rank], "combine", self.starts[rank], self.sources[rank], rows[rank], landing, self.signals, rank,
                self.arrived[rank] if overlapped else None, MINIBATCH, routing.offs, routing.inverse, weights[rank], out[rank],
            )
            for rank, routing in enumerate(self.routings)
        ]  # fmt: skip


def dispatch(xs: list[Tensor] | list[MXTensor], routings: list[Routing]) -> tuple[list, Exchange]:
    """(the rows of each rank's experts, the Exchange that `combine` takes). xs: each rank's tokens, (T, D), or their MXFP8 row
    copies, which come as pairs (values, scales), uint8. Rows past offs[-1] are not written. Raises TypeError, ValueError."""
    exchange, program = Exchange.of(routings), Program()
    quantized = any(isinstance(x, MXTensor) for x in xs)
    for x in xs if quantized else ():
        kind = (x.format, x.axis, x.scale_layout) if isinstance(x, MXTensor) else type(x).__name__
        if kind not in ((format, "row", "plain") for format in MX8):
            raise ValueError(f"xs must all be MXFP8 row copies with plain scales, got {kind}")
    rows = [x.values.view(torch.uint8) if quantized else x for x in xs]
    scales = [x.scales.view(torch.uint8) for x in xs] if quantized else []
    _check_ranks("xs", rows, [len(r.ids) for r in routings], (torch.uint8,) if quantized else FLOATS)

    def outputs(like):
        return [_poisoned((exchange.capacity, t.shape[1]), t.dtype) for t in like]

    out, scales_out = outputs(rows), outputs(scales)
    exchange.add_dispatch(program, exchange.add_schedule(program), rows, scales, out, scales_out)
    program.run()
    return list(zip(out, scales_out, strict=True)) if quantized else out, exchange


def combine(rows: list[Tensor], exchange: Exchange, weights: list[Tensor | None], out_dtype: torch.dtype) -> list[Tensor]:
    """Each rank's y (T, D), summed as `unpermute` sums; rows (capacity, D): the experts' outputs, BF16 or FP32. Raises TypeError,
    ValueError."""
    _check_ranks("rows", rows, [exchange.capacity] * len(exchange.routings), (torch.bfloat16, torch.float32))
    for w, r in zip(weights, exchange.routings, strict=True):
        if w is not None:
            check_tensor("weights", w, 2, (torch.float32,))
            check_shape("weights", w, r.ids.shape)
    check_choice("out_dtype", out_dtype, FLOATS)
    program, width = Program(), rows[0].shape[1]
    landing = [_poisoned((r.ids.numel(), width), rows[0].dtype) for r in exchange.routings]
    out = [_poisoned((r.ids.shape[0], width), out_dtype) for r in exchange.routings]
    exchange.add_combine(program, [-1] * len(rows), rows, landing, weights, out, overlapped=False)
    program.run()
    return out


def _check_ranks(name: str, parts: list[Tensor], num_rows: list[int], dtypes: tuple[torch.dtype, ...]):
    """One matrix of each rank, with so many rows, all of one width and one dtype."""
    if len(parts) != len(num_rows):
        raise ValueError(f"{name} must have one matrix for each of the {len(num_rows)} ranks, got {len(parts)}")
    for rank, (part, count) in enumerate(zip(parts, num_rows, strict=True)):
        check_tensor(f"{name}[{rank}]", part, 2, dtypes if rank == 0 else (parts[0].dtype,))
        check_shape(f"{name}[{rank}]", part, (count, parts[0].shape[1]))


def _poisoned(shape, dtype: torch.dtype) -> Tensor:
    """As all memory of the interpreter begins."""
    t = torch.empty(shape, dtype=dtype)
    t.view(torch.uint8).fill_(0x7F)
    return t
