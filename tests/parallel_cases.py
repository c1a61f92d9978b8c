"""Ranks as processes: a pool of gloo ranks that stays up for a module, and what they run, `moe_layer(group=)` on their share.

Ranks are forked from a server that has imported everything, so that a pool is up in a fraction of a second.
"""

import multiprocessing
import os
import pickle
import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mxmoe import MoE, moe_experts, moe_layer, prepare_experts, quantize
from mxmoe.parallel import expert_slice
from tests.layer_cases import Layer, random_layer

PATIENCE = 60  # seconds for any answer: a failure of the test, never reached by a right program
SIZES = (1, 2, 4)

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])


# ---------------------------------------------------------------------------------------------------------------------- layers


@dataclass(frozen=True)
class Case:
    """A layer whose tokens are shared out: tokens[r] to rank r, in order."""

    tokens: tuple[int, ...]
    recipe: str = "fp32"
    dtype: torch.dtype = torch.float32  # of x
    dims: tuple[int, int, int] = (64, 32, 8)  # D, F, E of all ranks
    top_k: int = 2
    replay: Tensor | None = None
    bias: bool = False
    shared: int = 0
    spread: float = 0.0  # of x's binary exponents
    seed: int = 0
    options: dict = field(default_factory=dict)

    def rows(self, rank: int) -> slice:
        start = sum(self.tokens[:rank])
        return slice(start, start + self.tokens[rank])


@dataclass
class Result:
    y: Tensor
    ids: Tensor
    weights: Tensor
    grads: dict[str, Tensor | None]  # by leaf of the layer


def make(case: Case) -> tuple[Layer, Tensor]:
    """(the whole layer, an uneven upstream gradient)."""
    dim, width, experts = case.dims
    tokens = sum(case.tokens)
    layer = random_layer(tokens, dim, width, experts, bias=case.bias, shared=case.shared, seed=case.seed)
    exponents = case.spread * torch.randn(tokens, dim, generator=torch.Generator().manual_seed(case.seed))
    layer.x = (layer.x.detach() * exponents.exp2()).to(case.dtype).requires_grad_()
    dy = torch.sin(torch.arange(tokens * dim) * 0.7).view(tokens, dim).to(case.dtype)
    return layer, dy


def run(layer: Layer, dy: Tensor, case: Case, layer_function=moe_layer, **options) -> Result:
    y, routing = layer_function(
        layer.x, layer.router, layer.w13, layer.w2, b13=layer.b13, b2=layer.b2, shared=layer.shared, top_k=case.top_k,
        replay=case.replay, recipe=case.recipe, **case.options, **options,
    )  # fmt: skip
    y.backward(dy)
    leaves = {name: getattr(layer, name) for name in ("x", "router", "w13", "w2", "b13", "b2")}
    leaves |= dict(zip(("shared_w13", "shared_w2"), layer.shared or (), strict=False))
    grads = {name: t.grad for name, t in leaves.items() if t is not None}
    return Result(y.detach(), routing.ids, routing.weights.detach(), grads)


def single(case: Case, of_rank: int | None = None) -> Result:
    """One process with all tokens; of_rank: only the tokens of that rank have an upstream gradient."""
    layer, dy = make(case)
    if of_rank is not None:
        rows = case.rows(of_rank)
        dy[: rows.start] = 0
        dy[rows.stop :] = 0
    return run(layer, dy, case)


def own_share(case: Case, group: dist.ProcessGroup, experts: slice | None = None) -> tuple[Layer, Tensor, Case]:
    """This rank's tokens and experts."""
    layer, dy = make(case)
    rows, experts = case.rows(group.rank()), experts or expert_slice(case.dims[2], group)

    def leaf(t, index):
        return None if t is None else t.detach()[index].clone().requires_grad_()

    layer.x = leaf(layer.x, rows)
    for name in ("w13", "w2", "b13", "b2"):
        setattr(layer, name, leaf(getattr(layer, name), experts))
    replay = None if case.replay is None else case.replay[rows]
    return layer, dy[rows], replace(case, replay=replay)


# ------------------------------------------------------------------------------------------- what ranks run: (group, ...) -> result


def ranked(group, case: Case, experts: slice | None = None, **options) -> Result:
    return run(*own_share(case, group, experts), group=group, **options)


def module(group, case: Case, options: dict) -> tuple[Result, dict[str, Tensor]]:
    """`MoE` built from a seed, on this rank's tokens; group None: on all. (its results, its parameters)"""
    torch.manual_seed(case.seed)
    dim, width, experts = case.dims
    moe = MoE(dim, width, experts, case.top_k, recipe=case.recipe, shared_dim=case.shared, group=group, **options)
    layer, dy = make(case)
    rows = slice(None) if group is None else case.rows(group.rank())
    x = layer.x.detach()[rows].requires_grad_()
    y, routing = moe(x)
    y.backward(dy[rows])
    grads = {name: p.grad for name, p in moe.named_parameters()} | {"x": x.grad}
    return Result(y.detach(), routing.ids, routing.weights.detach(), grads), {n: p.detach() for n, p in moe.named_parameters()}


def experts_only(group, case: Case, ids: Tensor, weights: Tensor, how: str) -> Tensor:
    layer, _, case = own_share(case, group)
    x, w13, w2, options = layer.x, layer.w13, layer.w2, {}
    if how == "transposed":
        x = x.t().contiguous().t()
    elif how == "prepared":
        options["prepared"] = prepare_experts(w13, w2, case.recipe)
    elif how == "frozen":
        w13, w2 = quantize(w13, "mxfp8"), quantize(w2, "mxfp8")
    return moe_experts(x, ids, weights, w13, w2, recipe=case.recipe, group=group, **options).detach()


def failing(group, case: Case, frozen: str | None) -> Exception:
    """The ValueError of a call; frozen: "x" or "experts" needs no gradient."""
    layer, dy, case = own_share(case, group)
    for t in {None: (), "x": (layer.x,), "experts": (layer.w13, layer.w2)}[frozen]:
        t.requires_grad_(False)
    try:
        run(layer, dy, case, group=group)
    except ValueError as error:
        return error
    raise AssertionError("no error")


def outsider(group) -> Exception | slice:
    """What a rank gets that is not in the group of rank 0."""
    try:
        return expert_slice(8, dist.new_group([0]))
    except ValueError as error:
        return error


def checkpointed(group, case: Case) -> Result:
    def layer_function(*args, **options):
        return checkpoint(moe_layer, *args, use_reentrant=False, **options)

    return run(*own_share(case, group), layer_function, group=group)


def compiled(group, case: Case) -> Result:
    return run(*own_share(case, group), torch.compile(moe_layer, backend="eager"), group=group)


def seconds_to_error(group, case: Case, absent: str, timeout: float) -> tuple[Exception, float]:
    """The last rank stays away from, or is gone before, the forward or the backward of the others, which fail."""
    group = dist.new_group(dist.get_process_group_ranks(group), timeout=timedelta(seconds=timeout))
    layer, dy, case = own_share(case, group)
    last = group.rank() == group.size() - 1
    dist.barrier(group)
    start = time.monotonic()
    try:
        if last and absent.startswith("forward"):
            return _leave(absent)
        y, _ = moe_layer(layer.x, layer.router, layer.w13, layer.w2, top_k=case.top_k, recipe=case.recipe, group=group)
        if last:
            return _leave(absent)
        y.backward(dy)
    except OSError as error:
        return error, time.monotonic() - start
    raise AssertionError("no error")


def _leave(absent: str):
    if absent.endswith("dies"):
        os._exit(1)
    return None, 0.0


# ------------------------------------------------------------------------------------------------------------------------ ranks


class Ranks:
    """`size` processes, each a rank of one gloo world on this machine; stop() ends them."""

    def __init__(self, size: int):
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, f"{self.folder.name}/store", there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def __call__(self, size: int, function, *args, errors: bool = False, **options) -> list:
        """function(group, *args, **options) on the first `size` ranks -> results; an exception is raised, or a result (errors)."""
        for rank in range(size):
            per_rank = [a[rank] if isinstance(a, PerRank) else a for a in args]
            self.pipes[rank].send_bytes(pickle.dumps((function, size, per_rank, options)))
        results = []
        for rank, pipe in enumerate(self.pipes[:size]):
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"rank {rank} did not answer within {PATIENCE} s")
            try:
                results.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                results.append(None)
        for result in results:
            if isinstance(result, Exception) and not errors:
                raise result
        return results

    def stop(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()
        self.folder.cleanup()


class PerRank(list):
    """An argument that is another for each rank."""


def _serve(rank: int, size: int, store: str, pipe):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE / 2)
    )
    groups = {n: dist.new_group(range(n)) for n in SIZES if n <= size}
    while True:
        try:
            function, n, args, options = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # without the goodbyes of a group that may be broken
        try:
            result = function(groups[n], *args, **options)
        except Exception as error:
            result = error.with_traceback(None)
        pipe.send_bytes(pickle.dumps(result))
