"""The project's own tests as bars: how many of some pass, or fail."""

import re
import subprocess
import sys

from benchmarks.bars.harness import NotMeasured, Run
from benchmarks.machine import ROOT


def counts(run: Run, arguments: tuple[str, ...]) -> dict[str, int]:
    """Of the tests that pytest takes with these arguments: passed, failed, error, skipped. NotMeasured if none ran."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    found = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", output.rpartition("\n")[2]):
        found[word] = int(number)
    run.note(", ".join(f"{number} {word}" for word, number in found.items() if number))
    if not found["passed"] and not found["failed"] and not found["error"]:
        raise NotMeasured(f"no test ran: {output[-200:] or 'no output'}")
    return found


def failing(arguments: tuple[str, ...], run: Run) -> int:
    found = counts(run, arguments)
    return found["failed"] + found["error"]


def passing(arguments: tuple[str, ...], run: Run) -> int:
    """RuntimeError if one fails. A skipped test does not count."""
    found = counts(run, arguments)
    if found["failed"] or found["error"]:
        raise RuntimeError(f"{found['failed']} failed, {found['error']} errors")
    return found["passed"]
