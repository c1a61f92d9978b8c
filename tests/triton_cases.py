"""The Triton kernels against the reference: cases by name, and the process that runs them in Triton's interpreter.

`TRITON_INTERPRET=1 python -m tests.triton_cases` reads names, a line each, and answers each with a line of JSON: null, or what went
wrong. The interpreter is chosen when kernels are decorated and replaces parts of Triton, so it has a process of its own.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch

from mxmoe import ops
from mxmoe.formats import FORMATS
from mxmoe.recipes import SwiGLU
from tests import conformance, interpreter_cases
from tests.conformance import COPIES, DTYPES, GROUPS, TAILS
from tests.gemm_cases import Problem, assert_within_bound, operand, products
from tests.helpers import Backend, assert_same_bits, boundary_inputs, differences
from tests.interpreter_cases import (
    check_decode,
    check_grouped_mm,
    check_route,
    check_rows,
    check_swiglu,
    check_wgrad,
    ends,
    route_case,
    sort_case,
)

ROWS = conformance.ROWS | {"mostly empty": (3, 2, 40, 64)}
MULTIPLIED = ("fp32", *conformance.FORMATS, "mxfp4")
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


def multiplied(check: Callable, shape: str, format: str, dtype: torch.dtype, **options):
    outputs, contraction, past = TAILS[shape]
    check(Problem(GROUPS[shape], outputs, contraction, past), format, dtype, **options)


def multiplied_views():
    """Operands and output are views with strides of their own; NaN and Inf stay in their rows, or in their experts' columns."""
    p, g = Problem((3, 0, 30), 20, 40, past=2), torch.Generator().manual_seed(0)
    a, w = torch.randn(p.rows, 50, generator=g)[:, 7:47], torch.randn(3, 41, 60, generator=g)[:, 1:41:2, 5:45]
    a[1, 3], a[4, 5], w[2, 6, 1] = float("nan"), float("inf"), float("nan")
    out = torch.full((p.rows, 2 * p.outputs), 7.0)[:, ::2]
    TRITON.run("grouped_mm", (a, None, None, "fp32"), (w, None, None, "fp32"), p.offs, None, out)
    y, size = products(operand(a, "fp32"), operand(w, "fp32"), p.offs, p.rows)
    finite = y.isfinite()
    assert torch.equal(out.isfinite(), finite)
    assert finite.sum() == p.rows * p.outputs - 2 * p.outputs - 29
    assert_within_bound(out[finite], y[finite], size[finite], p.contraction)


def nan_is_kept():
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    x[0, 0] = float("nan")
    t = TRITON.quantize(x, "mxfp8")
    assert t.scales.view(torch.uint8).tolist() == [[255, 119]]
    assert (t.values.view(torch.uint8)[0, :32] == 0x7F).all()
    assert (TRITON.dequantize(t)[0, 32:] == 1.0).all()


def elements_saturate():
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([464.0, 465.0, 480.0, 511.0, -480.0])
    t = TRITON.quantize(x, "mxfp8", scale_mode="floor")
    assert t.values.view(torch.uint8)[0, :5].tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE]


def ties_go_to_the_lower_id():
    for score, num_groups in product(("softmax", "sigmoid"), (1, 4)):
        ids, weights = torch.full((4, 3), -7, dtype=torch.int32), torch.empty(4, 3)
        logits, kept = torch.zeros(4, 8), (num_groups + 1) // 2
        TRITON.run("route", logits, None, None, 3, score, num_groups, kept, True, 1.0, None, ids, weights, None, None)
        assert ids.tolist() == [[0, 1, 2]] * 4


def one_call_or_two():
    """Both copies of one pass are those of a pass each."""
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for axis, copy in zip(("row", "column"), TRITON.quantize(x, "mxfp8", "both"), strict=True):
        assert differences(copy, TRITON.quantize(x, "mxfp8", axis)) == 0


def many_experts():
    """More than rows, most of them empty."""
    sizes = [0] * 140
    sizes[3], sizes[100], sizes[139] = 2, 1, 3
    check_grouped_mm(Problem(tuple(sizes), 8, 33, past=2), "mxfp8")
    check_route(3, 700, 8, "sigmoid", biased=True, num_groups=7, groups_kept=2)


def odd_views():
    """Strides of 0, of a transpose and of every second element; a single element."""
    x = boundary_inputs(40, 66, 4, torch.float32, finite=False)
    for view in (x[:1].expand(40, 66), x.T, x[::2, 1::2], x[:1, :1]):
        check_copies(view, "nvfp4", "row")
        check_copies(view, "mxfp4", "both", ends(1, 0, len(view) - 1))


def multiplied_without_groups():
    """Every row is past the last group."""
    out = torch.full((5, 8), 7.0)
    none = torch.empty(0, 8, 16)
    TRITON.run("grouped_mm", (torch.ones(5, 16), None, None, "fp32"), (none, None, None, "fp32"), ends()[:0], None, out)
    assert not out.any()


def compiled():
    """torch.compile traces the verbs whole, by their fakes, to the same bytes."""
    x, w = torch.randn(40, 64).bfloat16(), torch.randn(2, 64, 64).bfloat16()
    offs, on = ends(9, 30), {"backend": "triton"}

    def forward(x, w):
        h = ops.grouped_mm(ops.quantize(x, "mxfp8", **on), ops.quantize(w, "mxfp8", **on), offs, **on)
        return ops.swiglu(h, offs=offs, **on)

    assert_same_bits(torch.compile(forward, fullgraph=True, backend="aot_eager")(x, w), forward(x, w))


def products_table(every_dtype: bool) -> dict[str, Callable[[], None]]:
    """Of the matrix products. The short table has each format on ragged groups, and each other shape in some."""
    found = {}
    for turn, (format, shape) in enumerate(product(MULTIPLIED, GROUPS), 1):
        dtype, column = DTYPES[turn % 3], format in ("fp32", "bf16", "fp16") or FORMATS[format].bits == 8
        if every_dtype or shape == "ragged" or turn % 3 == 0:
            found[f"grouped_mm {format} {shape}"] = partial(multiplied, check_grouped_mm, shape, format, dtype, bias=True)
        if column and (every_dtype or (shape == "ragged") != (turn % 4 == 0)):
            found[f"grouped_mm columns {format} {shape}"] = partial(
                multiplied, check_grouped_mm, shape, format, dtype, columns=True
            )
        wgrad_dtype = DTYPES[turn % 2]
        for accumulate in (False, True):
            if every_dtype or (shape == "ragged" and accumulate == (turn % 8 < 4)):
                name = f"grouped_mm_wgrad {'added' if accumulate else 'written'} {format} {shape}"
                found[name] = partial(multiplied, check_wgrad, shape, format, wgrad_dtype, accumulate=accumulate)
    for format in (*conformance.FORMATS, "mxfp4"):
        found[f"moe_decode {format}"] = partial(check_decode, 3, 3, 37, 5, 3, format)
    return found | {"grouped_mm views": multiplied_views, "grouped_mm no groups": multiplied_without_groups, "compiled": compiled}


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
    found |= {
        "route": route_case,
        "sort": sort_case,
        "case q05": nan_is_kept,
        "case q09": elements_saturate,
        "case q33": one_call_or_two,
        "case r11": ties_go_to_the_lower_id,
        "case many experts": many_experts,
        "case odd views": odd_views,
    }
    return found | products_table(every_dtype)


@contextmanager
def interpreted() -> Iterator[Callable[[str], str | None]]:
    """Within, a function that runs a case by its name in a process whose Triton interprets: None, or what went wrong."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton_cases"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=environment) as process:

        def run(name: str) -> str | None:
            print(json.dumps(name), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


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
