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
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "tests/test_anygress.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise AssertionError(result.stdout[-500:])
    held = re.findall(r"^PASSED \S*::test_(\w+)", result.stdout, re.M)
    run.note(f"{len(held)} tests in all, the policy engine's own included")
    inside = set(re.findall(r"^def test_(\w+)\((?:place|outside)", (ROOT / "tests/test_anygress.py").read_text(), re.M))
    return float(sum(name in inside for name in held))


BARS = [Bar("egress: policy tests that hold", ">=", 25, "tests", passed)]
