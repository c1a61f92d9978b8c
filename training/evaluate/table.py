"""All evaluations of one model, the table of several, and the choice of a base."""

import json
import sysconfig
import time
from dataclasses import dataclass, fields
from pathlib import Path

from training.evaluate import human_eval, likelihood, state_tracking
from training.evaluate.lm import LM, load_lm

HIGHER = ("knowledge", "pass@")  # numbers that are better high; the others are better low
CHOICE = ("knowledge", "state bits per byte", "codebase NLL")  # what the report chooses by: knowledge, state tracking, perplexity
EVALUATIONS = ("heldout", "codebase", "state", "knowledge", "humaneval")


@dataclass(frozen=True)
class Effort:
    """What is evaluated, and how much of it."""

    corpus: str = "stdlib"  # sources of held-out documents; the first also of questions and edited files
    codebase: str = ""  # directory for codebase perplexity; empty: a package of the standard library
    only: str = ",".join(EVALUATIONS)  # evaluations, by commas
    characters: int = 20_000  # of held-out text, and of the code base
    questions: int = 40  # of knowledge
    files: int = 8  # of state tracking
    diffs: int = 4  # of each
    tasks: int = 164  # of HumanEval
    answers: int = 1  # to each

    def __post_init__(self):
        for f in fields(self):
            if f.type is int and getattr(self, f.name) < 1:
                raise ValueError(f"{f.name} must be at least 1, got {getattr(self, f.name)}")


def evaluate(lm: LM, effort: Effort) -> dict[str, float]:
    """Name -> number, and the seconds it took. ValueError for an unknown evaluation."""
    chosen = [name.strip() for name in effort.only.split(",")]
    if unknown := set(chosen) - set(EVALUATIONS):
        raise ValueError(f"only must be of {', '.join(EVALUATIONS)}, got {', '.join(sorted(unknown))}")
    source = effort.corpus.split(",")[0].rsplit(":", 1)[0]
    directory = effort.codebase or str(Path(sysconfig.get_path("stdlib"), likelihood.CODEBASE))
    calls = {
        "heldout": lambda: likelihood.heldout(lm, effort.corpus, effort.characters),
        "codebase": lambda: likelihood.codebase(lm, directory, effort.characters),
        "state": lambda: state_tracking.state_tracking(lm, source, effort.files, effort.diffs),
        "knowledge": lambda: likelihood.knowledge(lm, source, effort.questions),
        "humaneval": lambda: human_eval.human_eval(lm, effort.tasks, effort.answers),
    }
    start, results = time.monotonic(), {}
    for name in EVALUATIONS:
        if name in chosen:
            results |= calls[name]()
    return results | {"seconds": time.monotonic() - start}


def is_better(name: str, a: float, b: float) -> bool:
    return a > b if name.startswith(HIGHER) else a < b


def table(results: dict[str, dict[str, float]]) -> str:
    """A line per number, a column per model; the best of several has a star."""
    names = list(dict.fromkeys(name for numbers in results.values() for name in numbers))
    lines = [["", *results]]
    for name in names:
        values = [numbers.get(name) for numbers in results.values()]
        best = values[0]
        for value in values:
            best = value if best is None or (value is not None and is_better(name, value, best)) else best
        starred = len(results) > 1 and name != "seconds"
        lines.append([name, *("-" if v is None else f"{v:.4g}{' *' if starred and v == best else ''}" for v in values)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def select(results: dict[str, dict[str, float]]) -> str:
    """The model that is first in most of the report's three numbers; of equals the one with the lowest codebase NLL."""
    names = [name for name in CHOICE if all(name in numbers for numbers in results.values())]
    if not names:
        raise ValueError(f"select needs one of {', '.join(CHOICE)}, got {', '.join(next(iter(results.values())))}")

    def firsts(model: str) -> int:
        return sum(not any(is_better(n, results[o][n], results[model][n]) for o in results) for n in names)

    return min(results, key=lambda model: (-firsts(model), results[model].get(names[-1], 0.0)))


def main(paths: list[str], effort: Effort, recipe: str | None, window: int | None, choose: bool, out: str | None) -> int:
    """Evaluates each path and prints the table. Returns the process's exit status."""
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)  # before any time is spent
    results = {path: evaluate(load_lm(path, recipe, window), effort) for path in paths}
    print(table(results))
    if choose:
        print(f"\nselected: {select(results)}")
    if out:
        Path(out).write_text(json.dumps(results, indent=1) + "\n")
    return 0
