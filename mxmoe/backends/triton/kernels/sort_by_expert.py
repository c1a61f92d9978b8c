"""sort_by_expert: a stable counting sort. Runs of slots count their experts, running sums over runs and experts say where each
goes."""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.target import Target

RUN, EXPERTS, RUNS = 128, 64, 64  # slots of a run; experts and runs of a tile


@triton.jit
def run_of_slots(ids, num_slots, num_experts, RUN: tl.constexpr):
    """(slots of this program's run, their experts, num_experts for none and past the end)."""
    slots = tl.program_id(0) * RUN + tl.arange(0, RUN)
    expert = tl.load(ids + slots, mask=slots < num_slots, other=-1)
    return slots, tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)


@triton.jit
def count_kernel(ids, run_counts, num_slots, num_experts, RUN: tl.constexpr, EXPERTS: tl.constexpr):
    _, expert = run_of_slots(ids, num_slots, num_experts, RUN)
    e = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    count = tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(run_counts + tl.program_id(0) * num_experts + e, count, mask=e < num_experts)


@triton.jit
def running_kernel(run_counts, counts, num_runs, num_experts, RUNS: tl.constexpr, EXPERTS: tl.constexpr):
    """Counts of a run become those of the runs before it."""
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros((EXPERTS,), tl.int32)
    for run0 in range(0, num_runs, RUNS):
        run = run0 + tl.arange(0, RUNS)
        at = run_counts + run[:, None] * num_experts + e[None, :]
        mask = (run < num_runs)[:, None] & (e < num_experts)[None, :]
        here = tl.load(at, mask=mask, other=0)
        tl.store(at, before[None, :] + tl.cumsum(here, 0) - here, mask=mask)
        before += tl.sum(here, 0)
    tl.store(counts + e, before, mask=e < num_experts)


@triton.jit
def ends_kernel(counts, offs, num_experts, BLOCK: tl.constexpr):
    before = tl.zeros((BLOCK,), tl.int32)
    for e0 in range(0, num_experts, BLOCK):
        e = e0 + tl.arange(0, BLOCK)
        here = tl.load(counts + e, mask=e < num_experts, other=0)
        tl.store(offs + e, before + tl.cumsum(here, 0), mask=e < num_experts)
        before += tl.sum(here, 0)


@triton.jit
def place_kernel(ids, run_counts, counts, offs, permutation, inverse, num_slots, num_experts, RUN: tl.constexpr):
    slots, expert = run_of_slots(ids, num_slots, num_experts, RUN)
    mask = expert < num_experts
    earlier = (expert[:, None] == expert[None, :]) & (slots[:, None] > slots[None, :])
    row = tl.sum(earlier.to(tl.int32), 1)
    row += tl.load(run_counts + tl.program_id(0) * num_experts + expert, mask=mask, other=0)
    row += tl.load(offs + expert, mask=mask, other=0) - tl.load(counts + expert, mask=mask, other=0)
    tl.store(permutation + row, slots, mask=mask)
    tl.store(inverse + slots, tl.where(mask, row, -1), mask=slots < num_slots)


def sort_by_expert(on: Target, ids, num_experts, counts_out, offs_out, permutation_out, inverse_out):
    num_slots = ids.numel()
    runs, blocks = triton.cdiv(num_slots, RUN), triton.cdiv(num_experts, EXPERTS)
    run_counts = ids.new_empty(runs, num_experts)
    shared = dict(run_counts=run_counts, num_experts=num_experts)
    slots = dict(ids=ids, num_slots=num_slots, RUN=RUN, num_warps=8)
    permutation_out.fill_(-1)  # past the last row
    on.run(count_kernel, (runs, blocks), **shared, **slots, EXPERTS=EXPERTS)
    on.run(running_kernel, (blocks,), **shared, counts=counts_out, num_runs=runs, RUNS=RUNS, EXPERTS=EXPERTS, num_warps=4)
    on.run(ends_kernel, (1,), counts=counts_out, offs=offs_out, num_experts=num_experts, BLOCK=1024, num_warps=4)
    on.run(
        place_kernel, (runs,), **shared, **slots, counts=counts_out, offs=offs_out, permutation=permutation_out, inverse=inverse_out
    )
