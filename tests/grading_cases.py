"""Synthetic test logs in the print of each runner, and what SWE-bench's own grader says of them.

Names that runners or SWE-bench's parsers confuse (parametrized names cut to the same text with different outcomes) are left
out: there ours refuses to guess.
"""

import contextlib
import functools
import importlib
import random
import sys
import tempfile
import types
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rl.tasks.importers import SWEBENCH_PARSERS
from rl.tasks.logs import ERROR, FAILED, PASSED, SKIPPED, XFAIL, Status


@dataclass(frozen=True)
class Case:
    theirs: str  # the parser, by SWE-bench's name
    parser: str  # and by ours
    log: str
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    exit_code: int | None


def pytest_line(rng: random.Random, name: str, status: Status) -> str:
    return f"{status} {name}" + (rng.choice([" - assert 1 == 2", "", " - E - F"]) if status is FAILED else "")


DJANGO = {PASSED: "ok", FAILED: "FAIL", ERROR: "ERROR", SKIPPED: "skipped 'no'"}
# By parser: a test's name by number, the line that says its status, and the statuses that the runner can print.
PRINTERS = {
    "pytest": ("tests/test_m.py::test_{}[a-b]", pytest_line, (PASSED, FAILED, ERROR, XFAIL)),
    "pytest_short_paths": ("tests/test_m.py::test_{}[/file]", pytest_line, (PASSED, FAILED, ERROR, XFAIL)),
    "pytest_mouse_buttons": ("tests/test_m.py::test_{}[1]", pytest_line, (PASSED, FAILED, ERROR)),
    "unittest": ("test_{} (m.C)", lambda r, n, s: f"{n} ... {DJANGO[s]}", tuple(DJANGO)),
    "seaborn": ("t.py::test_{}", lambda r, n, s: f"FAILED {n} - x" if s is FAILED else f"{n} PASSED [ 1%]", (PASSED, FAILED)),
    "sympy": ("test_{}", lambda r, n, s: f"{n} {'ok' if s is PASSED else 'F'}", (PASSED, FAILED)),
    "jest": (
        "adds {} numbers",
        lambda r, n, s: f"  {dict(zip(Status, '✓✕ ○', strict=False))[s]} {n}{r.choice(['', ' (5 ms)'])}",
        (PASSED, FAILED, SKIPPED),
    ),
    "jest_json": ("a > adds {}", lambda r, n, s: f"[{s}] {n}", (PASSED, FAILED)),
    "jest_files": ("src/{}.js", lambda r, n, s: f"{s[:4]} {n}{r.choice(['', ' (5.1s)', ' (20ms)'])}", (PASSED, FAILED)),
    "vitest": (
        "a > adds {} numbers",
        lambda r, n, s: f" {dict(zip(Status, '✓× ↓', strict=False))[s]} {n}",
        (PASSED, FAILED, SKIPPED),
    ),
    "tap": ("adds {} numbers", lambda r, n, s: f"{'ok' if s is PASSED else 'not ok'} 3 {n}", (PASSED, FAILED)),
    "karma": (
        "suite > adds {}",
        lambda r, n, s: f"    {'✔' if s is PASSED else '✖'} {n.removeprefix('suite > ')}",
        (PASSED, FAILED),
    ),
    "gotest": ("Test{}/sub case", lambda r, n, s: f"    --- {s[:4]}: {n} (0.01s)", (PASSED, FAILED, SKIPPED)),
    "cargo": ("module::test_{}", lambda r, n, s: f"test {n} ... {'ok' if s is PASSED else s}", (PASSED, FAILED)),
    "maven": (
        "A#test{}",
        lambda r, n, s: f"+ mvn test -Dtest={n} -q\n[INFO] BUILD {'SUCCESS' if s is PASSED else 'FAILURE'}",
        (PASSED, FAILED),
    ),
    "gradle": ("org.A > test{}", lambda r, n, s: f"{n} {s}" if r.random() < 0.7 else f"{n}\nWARNING: x\n{s}", (PASSED, FAILED)),
    "ant": ("A.test{}()", lambda r, n, s: f"    [junit] [{s[:4] if s is not ERROR else 'ERR'}] {n}", (PASSED, FAILED, ERROR)),
    "googletest": ("A.test{}", lambda r, n, s: f"[ {'      OK' if s is PASSED else ' FAILED '} ] {n} (3 ms)", (PASSED, FAILED)),
    "doctest_cpp": (
        "case {} > sub",
        lambda r, n, s: (
            f'<TestCase name="{n.split(" > ")[0]}"><SubCase name="sub"><Expression '
            f'success="{str(s is PASSED).lower()}"/></SubCase></TestCase>'
        ),
        (PASSED, FAILED),
    ),
    "tcl": (
        "adds {} keys",
        lambda r, n, s: f"[{dict(zip(Status, ('ok', 'err', '', 'skip'), strict=False))[s]}]: {n}",
        (PASSED, FAILED, SKIPPED),
    ),
    "automake": ("tests/t{}", lambda r, n, s: f"{s[:4]}: {n}", (PASSED, FAILED)),
    "micropython": (
        "basics/t{}.py",
        lambda r, n, s: f"{dict(zip(Status, ('pass', 'FAIL', '', 'skip'), strict=False))[s]}  {n}",
        (PASSED, FAILED, SKIPPED),
    ),
    "minitest": ("TestA#test_{}", lambda r, n, s: f"{n}. 0.01 s = {'.' if s is PASSED else 'F'}", (PASSED, FAILED)),
    "cucumber": ("features/f{}.feature", lambda r, n, s: f"{n} {'...' if s is PASSED else '..F'}", (PASSED, FAILED)),
    "test_unit": (
        "adds {} numbers",
        lambda r, n, s: f"  test: {n}:\t{dict(zip(Status, '.FEO', strict=False))[s]}: (0.1)",
        (PASSED, FAILED, ERROR, SKIPPED),
    ),
    "rspec": ("A adds {} numbers", lambda r, n, s: f"{n} - {s.lower()}", (PASSED, FAILED)),
    "phpunit": (
        "Money > Adds {}",
        lambda r, n, s: f" {dict(zip(Status, '✔✘ ↩', strict=False))[s]} {n.removeprefix('Money > ')}",
        (PASSED, FAILED, SKIPPED),
    ),
}
FRAMES = {
    "karma": ("Starting browser Chrome\n  suite", ""),
    "doctest_cpp": ("<doctest>", "</doctest>"),
    "phpunit": ("Money (Tests\\Money)", ""),
}


PRINTED = [theirs for theirs, parser in SWEBENCH_PARSERS.items() if parser in PRINTERS]


def synthetic_logs(count: int, seed: int = 0) -> list[Case]:
    """Runs of 1 to 12 listed tests that pass, fail, are skipped or missing, one parser after the other."""
    rng, cases, names = random.Random(seed), [], list(PRINTED)
    for i in range(count):
        theirs = names[i % len(names)]
        parser = SWEBENCH_PARSERS[theirs]
        name, line, statuses = PRINTERS[parser]
        tests = [name.format(j) for j in range(rng.randint(1, 12))]
        split = rng.randint(1, len(tests))
        health = rng.choice([1.0, 1.0, 0.9, 0.5])  # most runs are wholly good or nearly so: those are the hard ones
        ran = {test: PASSED if rng.random() < health else rng.choice(statuses) for test in tests if rng.random() < 0.98}
        ran |= {name.format(100 + j): rng.choice(statuses) for j in range(rng.randint(0, 3))}  # tests of no list
        order = rng.sample(list(ran), len(ran))
        head, tail = FRAMES.get(parser, ("collecting ...", "done"))
        log = "\n".join([head, *(line(rng, test, ran[test]) for test in order), tail])
        bad = any(status in (FAILED, ERROR) for status in ran.values())
        cases.append(Case(theirs, parser, log, tests[:split], tests[split:], rng.choice([None, int(bad), 1])))
    return cases


@functools.cache
def swebench_modules() -> tuple[types.ModuleType, ...]:
    """SWE-bench's grading, its types and constants; imported past the package's own `__init__`, which wants docker and datasets."""
    root = Path(find_spec("swebench").origin).parent
    for package, directory in (("swebench", root), ("swebench.harness", root / "harness")):
        module = types.ModuleType(package)
        module.__path__ = [str(directory)]
        sys.modules[package] = module
    return tuple(importlib.import_module(f"swebench.{name}") for name in ("harness.grading", "types", "harness.constants"))


def swebench_verdicts(count: int, seed: int = 0) -> list[bool]:
    """Whether SWE-bench's grader calls each of `synthetic_logs` resolved. Changes `sys.modules`: run it in a process of its own."""
    grading, spec_types, markers = swebench_modules()
    verdicts = []
    for case in synthetic_logs(count, seed):
        exit_line = "" if case.exit_code is None else f"{markers.TEST_EXIT_CODE}: {case.exit_code}\n"
        spec = spec_types.TestSpec("a__b-1", "", [], "a/b", "1", case.fail_to_pass, case.pass_to_pass, case.theirs, "pass_and_fail")
        with tempfile.NamedTemporaryFile("w", suffix=".log") as file, contextlib.redirect_stdout(sys.stderr):
            file.write(f"{markers.START_TEST_OUTPUT}\n{case.log}\n{markers.END_TEST_OUTPUT}\n{exit_line}")
            file.flush()
            report = grading.get_eval_report(spec, {"instance_id": "a__b-1", "model_patch": "x"}, file.name, False)
        verdicts.append(report["a__b-1"]["resolved"])
    return verdicts
