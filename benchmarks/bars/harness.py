"""`Bar`, and how a list of bars is measured, judged, shown and stored."""

import json
import operator
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from benchmarks import machine

COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
TRIES = 3  # of a ratio while the machine is busy
QUICK = 100  # --quick divides counts by this


class NotMeasured(Exception):
    """Raised by a measurement that this machine cannot make, with the reason: the bar is not judged, and says so."""


@dataclass
class Run:
    """What a measurement is given: how much to do, and where to report progress."""

    quick: bool = False
    bar: tqdm | None = None
    notes: list[str] = field(default_factory=list)

    def note(self, text: str):
        """Shown beside the result, not stored."""
        self.notes.append(text)

    def count(self, full: int, least: int = 1) -> int:
        """`full`, or about a hundredth of it in a quick run."""
        return max(least, full // QUICK) if self.quick else full

    def steps(self, items, total: int | None = None):
        """Iterates over `items`, showing how far it is."""
        items = items if total is not None else list(items)
        if self.bar is not None:
            self.bar.reset(total if total is not None else len(items))
        for item in items:
            yield item
            if self.bar is not None:
                self.bar.update()


@dataclass(frozen=True)
class Bar:
    """One promise: `measure(run)` compared with `bound`.

    kind "value": does not depend on the machine. "ratio": of interleaved times; measured again, up to three times in all, while
    other processes use the machine before or after, and then not judged (holds None). "time": one measurement in seconds; a busy
    machine excuses a miss (None), a bar that holds in spite of it holds.
    """

    name: str
    compare: str  # a key of COMPARE
    bound: float
    unit: str
    measure: Callable[[Run], float]
    kind: str = "value"
    long: bool = False  # only with LONG=1; otherwise the last result is kept

    @property
    def target(self) -> str:
        return f"{self.compare} {self.bound:g}"

    def holds(self, measured: float) -> bool:
        return COMPARE[self.compare](measured, self.bound)  # False for NaN


@dataclass
class Result:
    """One line of benchmarks/results/bars-AREA.json."""

    name: str
    target: str
    measured: float | None
    unit: str
    holds: bool | None
    machine: str = ""
    commit: str = ""
    seconds: float = 0.0
    note: str = field(default="", repr=False)  # shown; stored where nothing was measured

    def stored(self) -> dict:
        unmeasured = self.measured is None and self.holds is None
        return {name: value for name, value in vars(self).items() if name != "note" or unmeasured}


def measure(bar: Bar, run: Run, busy: Callable[[], bool] = machine.is_busy) -> Result:
    """Measures and judges one bar. An exception is a bar that does not hold, with the error as its note."""
    start, note = time.monotonic(), ""
    try:
        if bar.kind == "value":
            measured, quiet = bar.measure(run), True
        else:
            measured, quiet = _timed(bar, run, busy)
        holds = bar.holds(measured)
        if not quiet and not (holds and bar.kind == "time"):
            holds = None
            run.note("the machine was busy")
        note = "; ".join(run.notes)
    except NotMeasured as reason:
        measured, holds, note = None, None, f"not measured: {reason}"
    except Exception as error:  # one broken bar must not hide the others
        traceback.print_exc()
        measured, holds, note = None, False, f"{type(error).__name__}: {error}".splitlines()[0]
    seconds = round(time.monotonic() - start, 1)
    return Result(bar.name, bar.target, measured, bar.unit, holds, machine.describe(), machine.commit(), seconds, note)


def _timed(bar: Bar, run: Run, busy: Callable[[], bool]) -> tuple[float, bool]:
    """(measured, whether the machine was quiet before and after)."""
    for _ in range(TRIES if bar.kind == "ratio" and not run.quick else 1):
        quiet = not busy()
        run.notes.clear()
        measured = bar.measure(run)
        quiet = quiet and not busy()
        if quiet:
            break
    return measured, quiet


def run_bars(
    bars: list[Bar], *, quick: bool = False, long: bool = False, results: Path | None = None, busy=machine.is_busy
) -> bool:
    """Measures the bars, prints the table and returns whether none fails. `results`: file whose lines of these bars are replaced;
    the lines of bars that are not measured now stay."""
    kept = _read(results)
    measured: list[Result] = []
    for i, bar in enumerate(bars):
        if bar.long and not long:
            continue
        with tqdm(desc=f"[{i + 1}/{len(bars)}] {bar.name}", leave=False, dynamic_ncols=True, mininterval=0.5) as progress:
            result = measure(bar, Run(quick, progress), busy)
        measured.append(result)
        tqdm.write(line(result))
        if results is not None and not quick:
            kept[bar.name] = result.stored()
            _write(results, kept)
    names = {result.name for result in measured}
    stored = [Result(**{"note": "last result"} | kept[bar.name]) for bar in bars if bar.name not in names and bar.name in kept]
    print("\n" + table(measured + stored, quick))
    for bar in bars:
        if bar.name not in names and bar.name not in kept:
            print(f"{bar.name}: never measured; LONG=1 measures it")
    return all(result.holds is not False for result in measured + stored)


def verdict(result: Result) -> str:
    return {True: "yes", False: "NO", None: "not judged"}[result.holds]


def line(result: Result) -> str:
    measured = "-" if result.measured is None else f"{result.measured:.4g} {result.unit}"
    return f"{result.name}: {measured}, target {result.target}: {verdict(result)} ({result.seconds:.0f} s) {result.note}".rstrip()


def table(results: list[Result], quick: bool = False) -> str:
    """Aligned text: name, target, measured, unit, holds."""
    rows = [("name", "target", "measured", "unit", "holds")]
    for r in results:
        shown = "-" if r.measured is None else f"{r.measured:.4g}"
        rows.append((r.name, r.target, shown, r.unit, f"{verdict(r)}  {r.note}".rstrip()))
    widths = [max(len(row[c]) for row in rows) for c in range(4)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]).rstrip() for row in rows]
    if quick:
        lines.append("quick run: counts divided by 100, nothing stored")
    return "\n".join(lines)


def _read(path: Path | None) -> dict[str, dict]:
    if path is None or not path.exists():
        return {}
    try:
        return {entry["name"]: Result(**entry).stored() for entry in json.loads(path.read_text())}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it to measure everything anew") from error


def _write(path: Path, entries: dict[str, dict]):
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(list(entries.values()), indent=1) + "\n")
    partial.replace(path)
