"""Bars of the Triton backend: conformance in Triton's interpreter, what Triton makes of its kernels for every architecture, the
paper model of GPU speed, and what a GPU measures."""

import shutil
import time
from functools import cache, partial

from benchmarks import roofline
from benchmarks.bars import suite
from benchmarks.bars.gpu.device import conformance_on_gpu, make_seconds, speed_on_gpu
from benchmarks.bars.harness import Bar, Run
from tests import triton_cases

# First words of the cases' names (tests/triton_cases.py): rows is permute, unpermute and its backward; swiglu has its backward.
BITWISE = ("case", "quantize", "route", "sort", "rows", "swiglu", "compiled")
BOUNDED = ("grouped_mm", "grouped_mm_wgrad", "moe_decode")


def wrong(kernel: str, run: Run) -> float:
    """Cases in the interpreter that are not the reference's bytes, or within the bound of NUMERICS.md."""
    names = [name for name in triton_cases.table(every_dtype=True) if name.split()[0] == kernel]
    names = names[: run.count(len(names))]
    count = 0
    with triton_cases.interpreted() as outcome:
        for name in run.steps(names):
            if outcome(name) is not None:
                count += 1
                run.note(name)
    run.note(f"{len(names)} cases")
    return count


@cache
def compiled() -> tuple[list, float]:
    """(every launch on every architecture, seconds)."""
    from tests import triton_code

    start = time.monotonic()
    with triton_code.all_facts() as found:
        return list(found), time.monotonic() - start


def not_compiled(run: Run) -> float:
    """1 where some launch does not compile."""
    found, _ = compiled()
    run.note(
        f"{len(found)} of {len({name for name, *_ in found})} launches and {len({arch for *_, arch, _ in found})} architectures"
    )
    return 0


def spilled(run: Run) -> float:
    """Bytes of registers kept in local memory, of all."""
    return sum(facts["spilled"] for *_, facts in compiled()[0])


def sweep_seconds(run: Run) -> float:
    """Of all launches on all architectures, nothing from the cache."""
    from tests import triton_code

    shutil.rmtree(triton_code.CACHE, ignore_errors=True)
    compiled.cache_clear()
    return compiled()[1]


def largest_error(run: Run) -> float:
    """Percent, of the published figures that were not fitted."""
    errors = roofline.errors()
    name = max(errors, key=lambda name: abs(errors[name]))
    run.note(f"{len(errors)} figures; {name}")
    return 100 * abs(errors[name])


TESTS = {
    "instructions of one launch of every kernel on sm_90 and sm_100": ("tests/test_triton_code.py", "-m", "not slow"),
    "instructions of every launch": ("tests/test_triton_code.py", "-k", "test_every_launch"),
    "assembly for gfx942 and gfx950": ("tests/test_triton_code.py", "-k", "amd"),
    "fallback, capture without host reads, cases that name Triton": ("tests/test_triton.py", "tests/test_info.py", "-k",
        "not reference or q05 or q09 or q33 or r11"),
}  # fmt: skip
BARS = [
    *(Bar(f"{k} in the interpreter: bitwise", "<=", 0, "wrong cases", partial(wrong, k)) for k in BITWISE),
    *(Bar(f"{k} in the interpreter: within the bound", "<=", 0, "wrong cases", partial(wrong, k)) for k in BOUNDED),
    Bar("launches x architectures that do not compile", "<=", 0, "launches", not_compiled),
    Bar("registers spilled, all of them", "<=", 0, "bytes", spilled),
    *(Bar(name, "<=", 0, "failing tests", partial(suite.failing, arguments)) for name, arguments in TESTS.items()),
    Bar("all launches on all architectures, compiled anew", "<", 720, "s", sweep_seconds, kind="time", long=True),
    Bar("roofline: largest error of a figure not fitted", "<=", 20, "%", largest_error),
    Bar("make test, built, on 2 cores", "<", 900, "s", partial(make_seconds, "test"), kind="time", long=True),
    Bar("on a GPU: conformance", "<=", 0, "wrong results", partial(conformance_on_gpu, "triton")),
    Bar("on a GPU: quantize mxfp8", ">=", 0.8, "x copy bandwidth", partial(speed_on_gpu, "quantize mxfp8 row", backend="triton")),
    Bar("on a GPU: grouped_mm bf16", ">=", 0.9, "x torch._grouped_mm", partial(speed_on_gpu, "grouped_mm bf16", backend="triton")),
]
