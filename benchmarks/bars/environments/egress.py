"""Anygress: the tests of what may leave, counted."""

import re
import subprocess
import sys

from benchmarks.bars.harness import Bar, NotMeasured, Run
from benchmarks.machine import ROOT
from tests.egress_cases import missing


def passed(run: Run) -> float:
    """Policy tests inside a network namespace that pass; none may fail."""
    if missing():
        raise NotMeasured(missing())
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_anygress.py",
        "-k",
        "place or nothing_leaves or limited",
    ]
    result = subprocess.run([*command[:-2], "-rA"], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise AssertionError(result.stdout[-500:])
    inside = re.findall(
        r"^PASSED .*::(test_(?:host|port|method|path_|size|header|dns|ip|private|raw|redirect|web|tls|own|many|by_def|conn)\S*)",
        result.stdout,
        re.M,
    )
    return float(len(inside))


BARS = [Bar("egress: policy tests that hold", ">=", 25, "tests", passed)]
