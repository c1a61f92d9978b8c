"""The Triton kernels against the reference: cases by name, and the process that runs them in Triton's interpreter.

`TRITON_INTERPRET=1 python -m tests.triton_cases` reads names, a line each, and answers each with a line of JSON: null, or what went
wrong. The interpreter is chosen when kernels are decorated and replaces parts of Triton, so it has a process of its own.
"""

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from mxmoe.formats import FORMATS
from mxmoe.recipes import SwiGLU
from tests import conformance, interpreter_cases
from tests.conformance import COPIES, DTYPES, GROUPS
from tests.helpers import Backend, assert_same_bits, boundary_inputs, differences
from tests.interpreter_cases import check_rows, check_swiglu, ends, route_case, sort_case

ROWS = conformance.ROWS | {"mostly empty": (3, 2, 40, 64)}
REFERENCE, TRITON = Backend("reference"), Backend("triton")


def check_copies(x, format: str, axis: str, offs=None, **options):
    """quantize; what it made dequantized, its scales blocked and plain again: the reference's bytes."""
    want, got = (b.quantize(x, format, axis, offs=offs, **options) for b in (REFERENCE, TRITON))
    for w, g in zip(*((t if axis == "both" else (t,)) for t in (want, got)), strict=True):
        assert differences(g, w) == 0
        assert_same_bits(TRITON.dequantize(w, x.dtype), REFERENCE.dequantize(w, x.dtype))
        blocked = REFERENCE.swizzle(w)
        assert torch.equal(TRITON.swizzle(w), blocked)
        assert torch.equal(TRITON.unswizzle(w, blocked), REFERENCE.unswizzle(w, blocked))


def quantized(shape: str, format: str, dtype: torch.dtype):
    """Whole, in groups and stacked; rows past the groups; lengths that no block divides."""
    sizes, nvfp4 = GROUPS[shape], FORMATS[format].has_global_scale
    x, offs = boundary_inputs(sum(sizes) + 9, 83, 1, dtype, finite=False), ends(*sizes)
    if nvfp4:
        check_copies(x, format, "row", offs)
        check_copies(x, format, "both", offs, scope="group")
        check_copies(x, format, "both", scope="tensor")
    else:
        check_copies(x, format, "both", offs)
        check_copies(x, format, "both", scale_mode="floor")


def stacked(format: str):
    """Experts' weights; a view that is not contiguous; no rows."""
    x = boundary_inputs(3 * 45, 64, 2, torch.bfloat16, finite=False).view(3, 45, 64)
    options = {"scope": "group"} if FORMATS[format].has_global_scale else {}
    check_copies(x.transpose(1, 2), format, "both", **options)
    check_copies(x[:, 3:41, 1:], format, "row")
    check_copies(torch.empty(0, 64), format, "row", ends(0, 0))


def moved(shape: str, dtype: torch.dtype, copies):
    check_rows(*ROWS[shape], dtype, copies)


def activated(shape: str, dtype: torch.dtype, copies, gate_up: str):
    sizes = GROUPS[shape]
    activation = SwiGLU(1.702, 7.0, 1.0) if gate_up == "interleaved" else SwiGLU()
    check_swiglu(sum(sizes) + 3, 32 if copies else 37, dtype, ends(*sizes), activation, gate_up, copies)


def table(every_dtype: bool = False) -> dict[str, Callable[[], None]]:
    """Name -> a case that raises where a kernel is wrong. Dtypes take turns, or each case has each."""
    found, turn = {}, iter(range(10**6))

    def dtypes():
        return DTYPES if every_dtype else (DTYPES[next(turn) % 3],)

    for format, shape in product(FORMATS, GROUPS):
        for dtype in dtypes():
            found[f"quantize {format} {dtype} {shape}"] = partial(quantized, shape, format, dtype)
    for format in FORMATS:
        found[f"quantize {format} stacked"] = partial(stacked, format)
    for copies, shape in product(COPIES, ROWS):
        for dtype in dtypes():
            found[f"rows {dtype} {shape} {copies}"] = partial(moved, shape, dtype, copies)
    for copies, shape, gate_up in product(COPIES, GROUPS, ("concatenated", "interleaved")):
        for dtype in dtypes():
            found[f"swiglu {gate_up} {dtype} {shape} {copies}"] = partial(activated, shape, dtype, copies, gate_up)
    return found | {"route": route_case, "sort": sort_case}


def main():
    interpreter_cases.INTERPRETER = TRITON
    torch.set_num_threads(1)
    cases = table(every_dtype=True) | table()
    for line in sys.stdin:
        try:
            cases[json.loads(line)]()
            answer = None
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
