"""Grading: from what each test did to resolved or not, by the rules of SWE-bench 5.

A task lists the tests that fail without its change and pass with it (fail-to-pass) and those that pass with and without it
(pass-to-pass). A result is resolved if every one of both passed. The rules, each of which some grader got wrong:

- passed is PASSED or XFAIL;
- a fail-to-pass test that was skipped or did not run has failed;
- a pass-to-pass test that was skipped has not regressed (unless `strict_skips`), one that did not run has;
- a listed name with an open bracket was cut at a space: it stands for the tests that begin so, if they agree;
- `fail_only`, for runners that print failures only: what is not reported as failed has passed;
- no result at all without evidence that a suite ran is invalid, and so is a run that exits non-zero and reports no failure:
  the log does not describe the run. Invalid is not resolved; whether the machine or the change was at fault, `suspicion` says.
"""

import re
from dataclasses import dataclass

from rl.tasks.logs import ERROR, FAILED, PASSED, SKIPPED, XFAIL, Results, Status

# A suite that ran says how many tests it ran; a zero is no evidence.
SUITE_RAN = re.compile(
    r"Executed [1-9]\d{0,9} of \d+|TOTAL: [1-9]\d{0,9} (?:SUCCESS|FAILED)|[1-9]\d{0,9} passing|Tests:\s+[1-9]\d{0,9}"
    r"|Test Suites:\s+(?:\d+ \w+, )*[1-9]\d{0,9} total|^# tests [1-9]\d{0,9}|[1-9]\d{0,9} specs?, \d+ failures?|': ok$",
    re.MULTILINE,
)
# What a broken machine prints, and what either a broken machine or a bad change may print.
SUSPICIONS = (
    ("machine", r"Cannot allocate memory|OutOfMemoryError|^Killed$|No space left on device|Too many open files"),
    ("machine", r"Could not resolve host|Temporary failure in name resolution|Error response from daemon"),
    ("machine", r"Failed to launch|cannot open display|Missing X server|unable to open X display"),
    (
        "unclear",
        r"Cannot find module|MODULE_NOT_FOUND|ModuleNotFoundError|no tests ran|collected 0 items|Timeout error: \d+ seconds",
    ),
)


@dataclass(frozen=True)
class Grade:
    """`resolved` is the score; the shares say how near it was; `invalid` names why a run could not be graded."""

    resolved: bool
    fail_to_pass: float  # share of the fail-to-pass tests that passed, 0 to 1
    pass_to_pass: float
    failed: tuple[str, ...] = ()  # listed tests that did not do what they should
    invalid: str | None = None
    suspicion: str | None = None  # of an invalid run: "machine" or "unclear"


def status_of(name: str, results: Results) -> Status | None:
    """The status of a listed test; None where it did not run, or where its cut name stands for tests that disagree."""
    if name in results:
        return results[name]
    if name.count("[") > name.count("]"):
        found = [status for test, status in results.items() if test.startswith(name)]
        if found and len({status in (PASSED, XFAIL) for status in found}) == 1:
            return found[0]
    return None


def suspicion(log: str) -> str | None:
    """Whether a log looks like a broken machine ("machine"), like that or a bad change ("unclear"), or neither."""
    return next((who for who, pattern in SUSPICIONS if re.search(pattern, log, re.MULTILINE)), None)


def grade(
    results: Results,
    fail_to_pass: list[str],
    pass_to_pass: list[str],
    *,
    exit_code: int | None = None,
    log: str = "",
    fail_only: bool = False,
    strict_skips: bool = False,
) -> Grade:
    """Grades one run of a task's tests.

    results       what each test did (`logs.parse`)
    fail_to_pass  names of the tests that the change must make pass; at least one
    pass_to_pass  names of the tests that must go on passing
    exit_code     of the test command, where known
    log           its output: evidence that it ran where `results` is empty
    Raises ValueError where no fail-to-pass test is listed: such a task cannot be failed.
    """
    if not fail_to_pass:
        raise ValueError("fail_to_pass: expected at least one test, got none")
    reason = None
    if not results and not SUITE_RAN.search(log):
        reason = "no test reported a result"
    elif exit_code not in (None, 0) and results and not any(status in (FAILED, ERROR) for status in results.values()):
        reason = f"the test command exited with {exit_code} and reported no failure"
    if reason:
        return Grade(False, 0.0, 0.0, tuple(fail_to_pass + pass_to_pass), reason, suspicion(log))

    def passed(name: str, fine: tuple[Status, ...]) -> bool:
        return results.get(name) is not FAILED if fail_only else status_of(name, results) in fine

    kept = (PASSED, XFAIL) if strict_skips else (PASSED, XFAIL, SKIPPED)
    broken_f2p = [name for name in fail_to_pass if not passed(name, (PASSED, XFAIL))]
    broken_p2p = [name for name in pass_to_pass if not passed(name, kept)]
    return Grade(
        resolved=not broken_f2p and not broken_p2p,
        fail_to_pass=1 - len(broken_f2p) / len(fail_to_pass),
        pass_to_pass=1 - len(broken_p2p) / len(pass_to_pass) if pass_to_pass else 1.0,
        failed=tuple(broken_f2p + broken_p2p),
    )
