"""GPU kernels under the interpreter: results under many schedules, mistakes that it finds, what it costs; and the suite's own tests
of the rest, counted."""

from collections import Counter
from collections.abc import Callable
from functools import cache, partial

from benchmarks import timing
from benchmarks.bars import suite
from benchmarks.bars.harness import Bar, NotMeasured, Run
from mxmoe.backends.interpreter import KernelError, running
from tests import conformance, mutants, peer_cases
from tests.gemm_cases import Problem
from tests.helpers import num_threads
from tests.interpreter_cases import CASES, check_grouped_mm

SEEDS = 20
# First words of the cases' names. copies: quantize with options, dequantize, swizzle_scales.
KERNELS = ("case", "quantize", "copies", "grouped_mm", "grouped_mm_wgrad", "route", "permute, unpermute", "swiglu", "moe_decode",
           "exchange")  # fmt: skip
CLASSES = sorted({area for area, _ in mutants.KINDS.values()})


def wrong(case: Callable[[], None]) -> bool:
    try:
        case()
    except NotImplementedError:  # its architecture has no such kernel
        return False
    except (AssertionError, KernelError):
        return True
    return False


def failures(kernel: str, run: Run) -> float:
    """(case, schedule) pairs that are wrong."""
    cases = {name: case for name, case in (conformance.table() | conformance.exchanges()).items() if name.startswith(f"{kernel} ")}
    seeds, count = run.count(SEEDS), 0
    with num_threads(1):
        for name, case in run.steps(cases.items(), total=len(cases)):
            for seed in range(seeds):
                with running(seed=seed, num_sms=1 + seed % 4):
                    if wrong(case):
                        count += 1
                        run.note(f"{name}, seed {seed}")
    return count


@cache
def mutation(least: int | None) -> tuple[Counter, Counter, tuple[str, ...]]:
    """(mutants by class, those that are caught, survivors) of every kernel's cases, or of the first `least` cases."""
    made, caught, survivors = Counter(), Counter(), []
    cases = [(name, case, ()) for name, case in {**CASES, "exchange": peer_cases.every_case}.items()]
    cases += [(name, case, peer_cases.OVERLAPPED_OPS) for name, case in peer_cases.OVERLAPPED.items()]
    with num_threads(1):
        for name, case, ops in cases[:least]:
            for m in mutants.mutants(case, ops):
                made[m.area] += 1
                if mutants.reason(case, m) is None:
                    survivors.append(f"{name}: {m.op} at {m.site}, {m.kind}")
                else:
                    caught[m.area] += 1
    return made, caught, tuple(survivors)


def score(area: str | None, run: Run) -> float:
    """Percent of mutants caught, of one class or of all."""
    made, caught, survivors = mutation(2 if run.quick else None)
    if area is None:
        run.note(f"{made.total()} mutants; survivors: {'; '.join(survivors) or 'none'}")
        return 100 * caught.total() / made.total()
    if not made[area]:
        raise NotMeasured(f"no mutant of class {area!r}")
    return 100 * caught[area] / made[area]


def interpreted(problem: Problem, run: Run) -> float:
    """Seconds of one case of MXFP8: its operands, the kernel and the product in FP64."""
    with num_threads(1):
        return min(timing.once(lambda: check_grouped_mm(problem, "mxfp8")) for _ in range(run.count(5, 2)))


TESTS = {
    "injected races, deadlocks and out-of-bounds reads: reported at the right place": (
        "tests/test_interpreter.py", "tests/test_ladder.py",
        "-k", "race_names or deadlock_names or past_an_array or missing_barrier",
    ),
    "moe_layer(group=) on 2 and 4 gloo ranks: equals one process": ("tests/test_parallel.py",),
    "torch.compile(fullgraph=True) over fakes, no value read on the host": ("tests/test_cuda.py",),
    "cases that name GPUs or the interpreter": (
        "tests/test_quantize_reference.py", "tests/test_route.py", "tests/test_grouped_mm.py", "tests/test_layer.py",
        "tests/test_build.py", "tests/test_ladder.py", "tests/test_ops_errors.py", "tests/test_interpreter_edges.py",
        "-m", "not slow", "-k", "b03 or g07 or g13 or l19 or q05 or q33 or r11",
    ),
}  # fmt: skip
BARS = [
    *(Bar(f"{k}: {SEEDS} schedules", "<=", 0, "wrong results", partial(failures, k), long=True) for k in KERNELS),
    Bar("mutants caught, all", ">=", 95, "%", partial(score, None), long=True),
    *(Bar(f"mutants caught, {area}", ">=", 90, "%", partial(score, area), long=True) for area in CLASSES),
    *(Bar(name, "<=", 0, "failing tests", partial(suite.failing, arguments)) for name, arguments in TESTS.items()),
    Bar("interpreter, one tile", "<", 0.02, "s", partial(interpreted, Problem((128,), 128, 128)), kind="time"),
    Bar("interpreter, 256 x 256 x 1024 MXFP8", "<", 2, "s", partial(interpreted, Problem((256,), 256, 1024)), kind="time"),
]
