"""Kernels done wrongly, one call at a time: which mistakes there are, and whether the interpreter or the result shows them.

A mutant is (label of the call site, kind). The interpreter does that one call wrongly at run time (csrc/interpreter); nothing is
compiled anew.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mxmoe.backends.interpreter import KernelError, running

OPERAND = ("start", "stride", "leading", "swizzle", "format")
# Mutants only at sites that say so: elsewhere they are what is done anyway.
CONDITIONAL = {"all lanes", "a.leading", "b.leading"}
MMA = ("skip", "accumulate", "n", "d", "all lanes", *(f"{o}.{field}" for o in "ab" for field in (*OPERAND, "major")))
# Instruction -> (class of operations, the ways to get it wrong).
KINDS = {
    "mbarrier.init": ("barrier", ("skip", "count", "all lanes")),
    "mbarrier.arrive": ("barrier", ("skip", "all lanes")),
    "mbarrier.arrive.expect_tx": ("barrier", ("skip", "more bytes", "fewer bytes", "all lanes")),
    "mbarrier.wait": ("barrier", ("skip", "parity")),
    "mbarrier.arrive.cluster": ("barrier", ("skip", "all lanes")),
    "mbarrier.wait.cluster": ("barrier", ("skip", "parity")),
    "barrier.cluster.arrive": ("barrier", ("skip",)),
    "barrier.cluster.wait": ("barrier", ("skip",)),
    "mapa": ("descriptor", ("rank",)),
    "syncthreads": ("barrier", ("skip",)),
    "tcgen05.commit": ("barrier", ("skip", "all lanes")),
    "tcgen05.commit.multicast": ("barrier", ("skip", "one", "all lanes")),
    "fence.mbarrier_init": ("fence", ("skip",)),
    "fence.proxy.async": ("fence", ("skip",)),
    "fence.proxy.async.global": ("fence", ("skip",)),
    "tcgen05.fence::before_thread_sync": ("fence", ("skip",)),
    "tcgen05.fence::after_thread_sync": ("fence", ("skip",)),
    "tcgen05.wait::ld": ("fence", ("skip",)),
    "tma_load": ("copy", ("skip", "column", "row", "all lanes")),
    "bulk_load": ("copy", ("skip", "all lanes")),
    "tma_store": ("copy", ("skip", "column", "row", "all lanes")),
    "tma_reduce_add": ("copy", ("skip", "column", "row", "all lanes")),
    "bulk_store": ("copy", ("skip", "all lanes")),
    "bulk_commit_group": ("fence", ("skip",)),
    "bulk_wait_group.read": ("fence", ("skip", "one more")),
    "bulk_wait_group": ("fence", ("skip", "one more")),
    "tcgen05.cp": ("descriptor", ("skip", "column", "start", "stride", "all lanes")),
    "tcgen05.mma": ("descriptor", MMA),
    "tcgen05.mma.block_scale": ("descriptor", (*MMA, "scale id a", "scale id b", "scale a", "scale b")),
    "wgmma.mma_async": ("descriptor", ("skip", "accumulate", *(f"{o}.{field}" for o in "ab" for field in OPERAND[:4]))),
    "wgmma.fence": ("fence", ("skip",)),
    "wgmma.commit_group": ("fence", ("skip",)),
    "wgmma.wait_group": ("fence", ("skip", "one more")),
    "tcgen05.alloc": ("tensor memory", ("skip",)),
    "tcgen05.dealloc": ("tensor memory", ("skip",)),
    "tcgen05.ld": ("tensor memory", ("skip", "column")),
    "red.release.sys.add": ("fence", ("skip", "relaxed", "all lanes")),
    "wait.acquire.sys": ("fence", ("skip", "relaxed", "fewer")),
    "ld.global.uniform": ("memory", ("skip",)),
    "ld.global": ("memory", ("skip", "all lanes")),
    "ld.global.v2": ("memory", ("skip", "all lanes")),
    "ld.global.v4": ("memory", ("skip", "all lanes")),
    "st.global": ("memory", ("skip", "all lanes")),
    "st.global.v2": ("memory", ("skip", "all lanes")),
    "st.global.v4": ("memory", ("skip", "all lanes")),
    "st.shared": ("memory", ("skip", "all lanes")),
    "st.shared.v2": ("memory", ("skip", "all lanes")),
    "st.shared.v4": ("memory", ("skip", "all lanes")),
    "st.shared.u8": ("memory", ("skip", "all lanes")),
    "ld.shared": ("memory", ()),
    "ld.shared.v2": ("memory", ()),
    "ld.shared.v4": ("memory", ()),
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Mutant:
    area: str  # class of operations
    op: str
    site: str
    kind: str


def mutants(case: Callable[[], None], ops=()) -> list[Mutant]:
    """Every mutant of the calls that `case` makes, or of those instructions."""
    with running() as run:
        case()
    unknown = {op for _, op, _, _ in run.sites} - set(KINDS)
    assert not unknown, unknown
    kinds = {(site, kind) for site, _, _, kinds in run.sites for kind in kinds}
    found = {Mutant(KINDS[op][0], op, site, kind) for site, op, _, _ in run.sites for kind in KINDS[op][1]}
    wanted = (m for m in found if not ops or m.op in ops)
    return sorted(m for m in wanted if m.kind not in CONDITIONAL or (m.site, m.kind) in kinds)


def reason(case: Callable[[], None], mutant: Mutant, seeds=range(3)) -> str | None:
    """How the mutant shows: the kind of the interpreter's report, "wrong result", or None where it does not."""
    for seed in seeds:
        try:
            with running(seed=seed, site=mutant.site, mutant=mutant.kind):
                case()
        except KernelError as error:
            return str(error).partition(":")[0]
        except AssertionError:
            return "wrong result"
    return None
