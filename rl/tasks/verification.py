"""Verification: what a change is worth, decided in a sandbox that the agent never saw.

    verdict = verify(task, patch, sandboxes)         # patch: `sandboxes.changes(task, sandbox)`, or anybody's `git diff`
    verdict.reward                                   # 1.0 or 0.0

A fresh sandbox is made from the task's base; the change is applied as a diff, so that nothing else of the agent's sandbox (its
processes, packages, caches, links, logs) comes along; only then are the tests put into it. What they did comes out over the
command's pipe and is graded here, by lists that are never in a sandbox. With parser "runner" the code under test cannot write to
that pipe (runner.py); with the parsers of printed logs, which foreign tasks need, it can print what it likes.

A failure of the machinery is a SandboxError, after one more try with a new sandbox: it is never a reward. What the change itself
does wrong (does not apply, hangs, uses up its memory) is a verdict with reward 0.
"""

import json
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.environments.sandbox import ExecResult, Sandbox, SandboxError, SandboxLost
from rl.harness.files import apply_patch
from rl.harness.schema import ToolError
from rl.harness.session import Session
from rl.tasks.grading import Grade, grade
from rl.tasks.logs import Results, Status, parse
from rl.tasks.task import Task, TaskError
from rl.tasks.workspace import Sandboxes, packed

RUNNER = Path(__file__).with_name("runner.py").read_bytes()
OUTSIDE = {"tests/expected.json", "tests/answer.json"}  # what results are compared with: never in a sandbox
MAX_PATCH = 16 << 20  # bytes
MAX_OUTPUT = 4 << 20
MAX_LOG = 20_000  # characters of a verdict's log


@dataclass(frozen=True)
class Verdict:
    """What a change is worth. `status` says why; `reason` in words. `log` is for people: it is what the tests printed."""

    reward: float
    status: Literal["resolved", "failed", "invalid", "not_applied", "timeout", "tampered"]
    reason: str = ""
    grade: Grade | None = None
    seconds: float = 0.0
    log: str = ""


def verify(task: Task, patch: str, sandboxes: Sandboxes, *, answer: str = "") -> Verdict:
    """Grades a change, or for tasks that ask a question the answer.

    patch   a unified diff of the work directory ("" for none), text or `git diff --binary`
    answer  the agent's last words
    Raises SandboxError where the machinery failed, TaskError for a task that cannot be run.
    """
    if task.verifier.parser == "answer":
        return judged_answer(task, answer)
    try:
        return verify_once(task, patch, sandboxes)
    except SandboxLost:
        return verify_once(task, patch, sandboxes)


class Verdicts:
    """`verify` that remembers: the same change of the same task is verified in a fresh sandbox once, and its verdict is every
    later one's. For groups of samples, of which many end alike. capacity: verdicts kept.
    """

    def __init__(self, capacity: int = 4096):
        self.capacity, self.hits, self.misses = capacity, 0, 0
        self._lock, self._known = threading.Lock(), OrderedDict()

    def __call__(self, task: Task, patch: str, sandboxes: Sandboxes, *, answer: str = "") -> Verdict:
        """As `verify`. A call that finds another at work on the same waits for it; a failure of the machinery is not remembered."""
        key = task.digest, patch, answer if task.verifier.parser == "answer" else ""
        with self._lock:
            own = self._known.get(key) is None
            future = self._known.setdefault(key, Future())
            self.hits, self.misses = self.hits + (not own), self.misses + own
            while len(self._known) > self.capacity:
                self._known.popitem(last=False)
        if not own:
            try:
                return future.result()
            except SandboxError:
                return verify(task, patch, sandboxes, answer=answer)
        try:
            verdict = verify(task, patch, sandboxes, answer=answer)
        except BaseException as error:
            with self._lock:
                self._known.pop(key, None)
            future.set_exception(error)
            raise
        future.set_result(verdict)
        return verdict


def verify_once(task: Task, patch: str, sandboxes: Sandboxes) -> Verdict:
    if len(patch) > MAX_PATCH:
        return Verdict(0.0, "not_applied", f"the patch has {len(patch)} bytes, more than {MAX_PATCH}")
    with sandboxes.start(task, lease_s=task.verifier.timeout_sec + 300) as sandbox:
        if reason := apply(sandbox, task.environment.workdir, patch, sandboxes.base(task).has_git):
            return Verdict(0.0, "not_applied", reason)
        done = run_tests(task, sandbox)
        return judged(task, sandbox, done)


def observe(task: Task, patch: str, sandboxes: Sandboxes) -> Results:
    """What each hidden test does after a change, of a task with parser "runner": lists of tests are made of this.

    Raises TaskError where the change does not apply or the run gives no report.
    """
    with sandboxes.start(task, lease_s=task.verifier.timeout_sec + 300) as sandbox:
        if reason := apply(sandbox, task.environment.workdir, patch, sandboxes.base(task).has_git):
            raise TaskError(f"{task.name}: {reason}")
        done = run_tests(task, sandbox)
        try:
            report = json.loads(done.stdout)
        except ValueError:
            raise TaskError(f"{task.name}: no report ({done.reason}): {done.stderr[-2000:].decode(errors='replace')}") from None
    if report["tampered"] or not report["results"]:
        raise TaskError(f"{task.name}: {report['tampered'] or 'no results'}: {done.stderr[-2000:].decode(errors='replace')}")
    return statuses(report["results"])


def apply(sandbox: Sandbox, workdir: str, patch: str, has_git: bool) -> str:
    """Applies a patch, all of it or none; says why it could not. First as git does, then with lines and their ends less exact."""
    if not patch.strip():
        return ""
    try:
        patch.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        return f"patch: expected UTF-8, or bytes as surrogates, got {error}"
    if has_git:
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        done = sandbox.exec(command, cwd=workdir, stdin=patch.encode("utf-8", "surrogateescape"), timeout_s=60)
        if done.ok:
            return ""
    try:
        apply_patch.run(Session(sandbox, workdir), patch)
    except (ToolError, OSError) as error:
        return str(error)
    return ""


def run_tests(task: Task, sandbox: Sandbox) -> ExecResult:
    """Puts the tests into the sandbox and runs them."""
    files = {p.removeprefix("tests/"): data for p, data in task.files.items() if p.startswith("tests/") and p not in OUTSIDE}
    files["runner.py"] = RUNNER
    script = 'rm -rf /tests /logs; umask 022; mkdir -p /tests /logs "$(dirname "$1")"; rm -rf "$1"; tar -xf - -C /tests'
    placed = sandbox.exec(["sh", "-c", script, "sh", task.verifier.report or "/logs/none"], stdin=packed(files), timeout_s=60)
    if not placed.ok:
        raise SandboxLost(f"{task.name}: the tests could not be put into the sandbox: {placed.text[-300:]}")
    shell = "bash" if files.get("test.sh", b"").startswith(b"#!/bin/bash") else "sh"
    return sandbox.exec(
        [shell, "/tests/test.sh"],
        cwd=task.environment.workdir,
        env={
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "TZ": "UTC",
            "RUNNER_SECONDS": str(0.95 * task.verifier.timeout_sec),  # then the runner says what it has
            **task.verifier.env,
        },
        timeout_s=task.verifier.timeout_sec,
        output_bytes=MAX_OUTPUT,
    )


def judged(task: Task, sandbox: Sandbox, done: ExecResult) -> Verdict:
    """The verdict over a run of the tests."""
    v = task.verifier
    log = (done.stderr if v.parser in ("runner", "outputs") else done.stdout + done.stderr).decode(errors="replace")[-MAX_LOG:]

    def verdict(status, reason="", found=None):
        return Verdict(float(status == "resolved"), status, reason, found, done.seconds, log)

    if done.reason in ("timeout", "idle"):
        return verdict("timeout", f"not done after {done.seconds:.0f} s")
    if done.reason == "oom":
        return verdict("failed", "out of memory")
    exit_code: int | None = done.exit_code
    text = done.stdout.decode(errors="replace")
    if v.parser in ("runner", "outputs"):
        try:
            report = json.loads(text)
        except ValueError:
            return verdict("invalid", f"the runner ended with {done.exit_code} and without a report")
        if report["tampered"]:
            return verdict("tampered", report["tampered"])
        try:
            results = compared(task, report["outputs"]) if v.parser == "outputs" else statuses(report["results"])
        except ValueError as error:  # of no runner's making
            return verdict("tampered", f"report: {error}")
        exit_code = None  # tests that are on no list may fail
    elif not v.fail_to_pass:
        return verdict("resolved" if done.ok else "failed", "" if done.ok else f"test.sh ended with {done.exit_code}")
    else:
        try:
            results = parse(reported(sandbox, v.report) if v.report else text, v.parser)
        except (OSError, ValueError) as error:
            return verdict("invalid", f"report: {error}")
    found = grade(results, list(v.fail_to_pass), list(v.pass_to_pass), exit_code=exit_code, log=text, fail_only=v.fail_only)
    if found.invalid:
        return verdict("invalid", found.invalid, found)
    return verdict("resolved" if found.resolved else "failed", ", ".join(found.failed[:3]), found)


def reported(sandbox: Sandbox, path: str) -> str:
    """A report of the tests. Through a link, or a directory that is one, it is none."""
    if sandbox.exec(["readlink", "-f", "--", path]).stdout.decode().rstrip("\n") != path:
        raise ValueError(f"expected a file at {path}, got a link or nothing")
    return sandbox.read(path, max_bytes=MAX_OUTPUT * 4).decode("utf-8", "replace")


def statuses(results: dict[str, str]) -> Results:
    return {name: Status(status) for name, status in results.items()}


def compared(task: Task, outputs: dict[str, dict]) -> Results:
    """What calls gave, each against what it should: types count, as JSON knows them."""
    expected = json.loads(task.files["tests/expected.json"])
    same = [json.dumps(outputs.get(str(i), {}).get("output", ...), default=repr) == json.dumps(e) for i, e in enumerate(expected)]
    return {f"call {i}": Status.PASSED if fine else Status.FAILED for i, fine in enumerate(same)}


def judged_answer(task: Task, answer: str) -> Verdict:
    """An answer is right if it has every expected expression as words of its own, and none that is wrong."""
    expected = json.loads(task.files["tests/answer.json"])

    def said(phrase: str) -> bool:
        return re.search(rf"(?<![\w.]){re.escape(phrase)}(?!\w)", answer) is not None

    missing = [phrase for phrase in expected["has"] if not said(phrase)]
    wrong = [phrase for phrase in expected.get("has_not", []) if said(phrase)]
    right = not missing and not wrong
    return Verdict(float(right), "resolved" if right else "failed", "" if right else f"{len(missing)} missing, {len(wrong)} wrong")
