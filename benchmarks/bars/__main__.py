"""Command line: `python -m benchmarks.bars [AREA]`. Exit status 0: no bar fails; 1: one does; 2: bad arguments or files."""

import argparse
import importlib
import os
import sys

from benchmarks.bars import AREAS
from benchmarks.bars.harness import run_bars
from benchmarks.machine import ROOT, conditions


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bars", description=__doc__)
    parser.add_argument("area", nargs="?", choices=AREAS, help="default: all areas")
    parser.add_argument("--only", metavar="TEXT", help="measure the bars whose name contains TEXT; other results stay")
    parser.add_argument("--quick", action="store_true", help="a hundredth of every count; nothing is stored")
    parser.add_argument("--list", action="store_true", help="print names and targets, measure nothing")
    arguments = parser.parse_args(argv)
    long = os.environ.get("LONG", "0") not in ("", "0")
    ok, found = True, False
    if not arguments.list:
        print(conditions())
    for area in [arguments.area] if arguments.area else AREAS:
        bars = importlib.import_module(f"benchmarks.bars.{area}").BARS
        if arguments.only:
            bars = [bar for bar in bars if arguments.only in bar.name]
        found = found or bool(bars)
        if arguments.list:
            print("\n".join(f"{bar.name}: {bar.target} {bar.unit}{' (LONG=1)' if bar.long else ''}" for bar in bars))
            continue
        results = ROOT / "benchmarks" / "results" / f"bars-{area}.json"
        try:
            ok = run_bars(bars, quick=arguments.quick, long=long or bool(arguments.only), results=results) and ok
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if not found:
        print(f"error: no bar has {arguments.only!r} in its name; --list shows them", file=sys.stderr)
        return 2
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
