"""Whether a task is sound: the reference change passes and no change fails, every time."""

import difflib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from rl.harness.files import lines_of
from rl.tasks.task import Task, TaskError
from rl.tasks.verification import verify
from rl.tasks.workspace import Sandboxes, WorkLost, packed


@dataclass(frozen=True)
class Check:
    """How often the reference change was paid, and how often no change was, of `times` each."""

    name: str
    times: int
    gold: int
    empty: int
    flaky: tuple[str, ...] = ()  # tests that failed with the reference change
    reason: str = ""

    @property
    def sound(self) -> bool:
        return self.gold == self.times and self.empty == 0

    def __str__(self) -> str:
        left = f"; {', '.join(self.flaky[:3])}" if self.flaky else ""
        return f"{self.name}: reference {self.gold}/{self.times}, empty {self.empty}/{self.times}{left} {self.reason}".rstrip()


def difference_of(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A patch between texts by path, without a process: for the many small changes of generated tasks."""
    patch = ""
    for path in sorted({*before, *after}):
        if before.get(path) == after.get(path):
            continue
        old, new = (lines_of(side.get(path, "")) for side in (before, after))
        names = [f"{letter}/{path}" if path in side else "/dev/null" for letter, side in (("a", before), ("b", after))]
        mode = "" if path in before and path in after else f"{'deleted' if path in before else 'new'} file mode 100644\n"
        lines = difflib.unified_diff(old, new, *names)
        patch += f"diff --git a/{path} b/{path}\n{mode}" + "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )
    return patch


def reference(task: Task, sandboxes: Sandboxes) -> str:
    """The reference change as a patch: solution/gold.patch, or what solution/solve.sh does in the agent's sandbox."""
    if "solution/gold.patch" in task.files:
        return task.files["solution/gold.patch"].decode("utf-8", "surrogateescape")
    solution = {path.removeprefix("solution/"): data for path, data in task.files.items() if path.startswith("solution/")}
    if "solve.sh" not in solution:
        raise TaskError(f"{task.name}: expected solution/gold.patch or solution/solve.sh")
    workdir = shlex.quote(task.environment.workdir)
    with sandboxes.start(task) as sandbox:
        script = f"mkdir -p /solution && tar -xf - -C /solution && cd {workdir} && sh /solution/solve.sh < /dev/null"
        done = sandbox.exec(script, stdin=packed(solution), timeout_s=task.agent_timeout_sec)
        if not done.ok:
            raise TaskError(f"{task.name}: solution/solve.sh ended with {done.exit_code}: {done.text[-300:]}")
        try:
            return sandboxes.changes(task, sandbox)
        except WorkLost as error:
            raise TaskError(f"{task.name}: solution/solve.sh: {error}") from None


def check(task: Task, sandboxes: Sandboxes, times: int = 5) -> Check:
    """Runs the reference change and no change `times` times each. Raises SandboxError and TaskError as `verify`."""
    if times < 1:
        raise TaskError(f"times: expected at least 1, got {times}")
    patch = reference(task, sandboxes)
    golds = [verify(task, patch, sandboxes) for _ in range(times)]
    empties = [verify(task, "", sandboxes) for _ in range(times)]
    flaky = sorted({name for verdict in golds if verdict.grade for name in verdict.grade.failed})
    reason = next((verdict.reason for verdict in golds if not verdict.reward), "")
    return Check(task.name, times, sum(v.reward == 1 for v in golds), sum(v.reward == 1 for v in empties), tuple(flaky), reason)
