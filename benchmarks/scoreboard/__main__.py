"""Command line: `python -m benchmarks.scoreboard`; see `--help`."""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace

from tqdm import tqdm

from benchmarks import machine
from benchmarks.cases import SHAPES, Shape
from benchmarks.scoreboard import render
from benchmarks.scoreboard.measure import Comparison, Roofs, left_out, measure
from benchmarks.scoreboard.verbs import TOKENS, Layer, comparisons, generation
from mxmoe import memory

QUICK_TOKENS = (1, 8, 16, 32, 64)
NEW_TOKENS = 32


def quick_shape(s: Shape) -> Shape:
    return replace(s, dim=128, expert_dim=64, num_experts=min(8, s.num_experts), top_k=min(2, s.top_k))


def everything(quick: bool) -> Iterator[Comparison]:
    """Shape after shape; a shape's weights are freed before the next one's are made."""
    for shape in SHAPES:
        yield from comparisons(Layer(quick_shape(shape) if quick else shape), QUICK_TOKENS if quick else TOKENS)
        gc.collect()
        memory.empty_cache()
    yield generation(2 if quick else NEW_TOKENS, quick)


def run(only: str, quick: bool, minutes: float) -> dict:
    """Measures what has `only` in its title until the time is over; the rest is named as left out."""
    roofs, rows, start = Roofs(), [], time.monotonic()
    others = machine.cores_used_by_others()
    for c in tqdm(everything(quick), dynamic_ncols=True, leave=False):
        if only not in c.title:
            continue
        if time.monotonic() - start > 60 * minutes:
            rows += left_out(c, "not measured: out of time")
            continue
        tqdm.write(c.title)
        try:
            rows += measure(c, roofs, 0.05 if quick else 2.0)
        except Exception as error:  # one broken comparison must not hide the others
            traceback.print_exc()
            rows += left_out(c, f"{type(error).__name__}: {error}".splitlines()[0][:80])
    others = max(others, machine.cores_used_by_others())
    return {
        "command": "python -m benchmarks.scoreboard",
        "conditions": machine.conditions(),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "others": round(others, 2),
        "busy": others > machine.MAX_OTHERS,
        "roofs": roofs.stored(),
        "rows": [row.stored() for row in rows],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoreboard", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="what has TEXT in its title; prints the table, stores nothing")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few calls, to try it out; stores nothing")
    parser.add_argument("--minutes", type=float, default=25.0, help="what is not reached by then is left out, and says so")
    parser.add_argument("--render", action="store_true", help="table and picture anew from the stored results")
    arguments = parser.parse_args(argv)
    if arguments.render:
        results = render.read()
        if results is None:
            print(f"error: {render.RESULTS} does not exist; measure first", file=sys.stderr)
            return 2
    else:
        results = run(arguments.only, arguments.quick, arguments.minutes)
        if not results["rows"]:
            print(f"error: nothing has {arguments.only!r} in its title", file=sys.stderr)
            return 2
        if arguments.quick or arguments.only:
            print(render.table(results))
            return 0
        render.RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    render.write_document(results)
    render.write_picture(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
