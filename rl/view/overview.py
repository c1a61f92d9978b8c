"""What stands above the list of groups: how far the run is, the curves of its metrics, its evaluations."""

import json
from pathlib import Path
from typing import Any

from rl.view.index import UNREADABLE, Damaged, Index, listed

Curves = dict[str, list[tuple[int, float | None]]]  # by name: (step, value), None where it was not finite
# Of an evaluation.
NUMBERS = ("version", "tasks", "samples", "mean", "mean_error", "best", "best_error", "parsed", "calls", "tokens")


def overview(index: Index) -> dict[str, Any]:
    """All of it, and the files that are damaged."""
    found = {"config": index.file("config.json", read_object), "state": index.file("state.json", read_state)}
    curves, wrong, alarms = {}, [], ""
    metrics = index.file("metrics.jsonl", read_curves)
    if isinstance(metrics, tuple):
        curves, wrong, alarms = metrics
    evaluations = [
        index.file(f"evaluations/{name}", read_evaluation)
        for name in listed(index.run_dir / "evaluations")
        if name.endswith(".json")
    ]
    damaged = [each for each in (*found.values(), metrics, *evaluations) if isinstance(each, Damaged)]
    damaged += [Damaged("metrics.jsonl", f"line {number} is no record") for number in wrong]
    fine = [each for each in evaluations if isinstance(each, dict)]
    order = {"before": -1, "after": 1}
    return {
        "run": str(index.run_dir),
        **{name: each if isinstance(each, dict) else None for name, each in found.items()},
        "curves": curves,
        "alarms": alarms,
        "evaluations": sorted(fine, key=lambda e: (order.get(e["name"], 0), e["name"])),
        "damaged": [vars(each) for each in damaged],
    }


def read_object(path: Path) -> dict:
    """Raises ValueError for what is no JSON object."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def read_state(path: Path) -> dict[str, Any]:
    """Of state.json: how far the run is."""
    state = read_object(path)
    reconciler = json.loads(state["reconciler"])
    return {name: reconciler[name] for name in ("step", "version", "counts")} | {"seconds": state["seconds"]}


def read_evaluation(path: Path) -> dict[str, Any]:
    found = read_object(path)
    return {"name": path.stem} | {name: float(found[name]) for name in NUMBERS}


def read_curves(path: Path) -> tuple[Curves, list[int], str]:
    """Of metrics.jsonl, the numbers of lines that are no records, and the newest alarms. A last line without its end is being
    written."""
    curves: Curves = {}
    wrong: list[int] = []
    alarms = ""
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            step = int(record.pop("step"))
        except UNREADABLE:
            wrong.append(number)
            continue
        alarms = str(record.get("alarms", alarms))
        for name, value in record.items():
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
                curves.setdefault(name, []).append((step, value))
    return curves, wrong, alarms
