"""Threads that carry samples out, and the sandboxes they use: a node of sandboxes that dies is replaced while they wait."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rl.environments.sandbox import SandboxError
from rl.evals.runner import Settings
from rl.harness.builtin import SamplerModel
from rl.harness.schema import ToolSet
from rl.rewards import RewardWeights
from rl.rollout import Rollout, roll_out
from rl.tasks.task import Task
from rl.tasks.verification import Verdicts
from rl.tasks.workspace import Sandboxes, open_sandboxes

LONGEST_WAIT_S = 5.0  # between two tries to open a backend


class Environments:
    """Sandboxes of a backend by name. `current` gives those that work; after the death of their node, `renew` opens it anew."""

    def __init__(self, directory: Path, backend: str):
        self.directory, self.backend = directory, backend
        self._lock, self._stack, self._closed = threading.Lock(), ExitStack(), False
        self._current = self._open()
        self.renewals = 0

    def _open(self) -> Sandboxes:
        return self._stack.enter_context(open_sandboxes(self.directory, self.backend))

    def current(self) -> Sandboxes:
        return self._current

    def renew(self, dead: Sandboxes) -> None:
        """Returns once there are others than `dead`: waits as long as it takes, unless closed."""
        with self._lock:
            wait = 0.05
            while self._current is dead and not self._closed:
                try:
                    self._stack.close()
                    self._current = self._open()
                    self.renewals += 1
                except (SandboxError, OSError):
                    time.sleep(wait)
                    wait = min(2 * wait, LONGEST_WAIT_S)

    def close(self) -> None:
        self._closed = True
        with self._lock:
            self._stack.close()


@dataclass(frozen=True)
class Job:
    """A sample to be carried out. done: told its rollout. failed: told why there is none, and whether the task could be why.

    on_end: called when its verification begins.
    """

    task: Callable[[], Task]
    model: Callable[[], SamplerModel]
    done: Callable[[Rollout], None]
    failed: Callable[[str, bool], None]
    on_end: Callable[[], None] = lambda: None


class Workers:
    """`count` threads. next_job(worker's name) gives their work, None where there is none now. hinting: see `rl.rollout.roll_out`.

    An exception that is no SandboxError is a fault of the program: it is kept in `error`, and the workers stop.
    """

    def __init__(
        self,
        count: int,
        next_job: Callable[[str], Job | None],
        environments: Environments,
        tools: ToolSet,
        settings: Settings,
        weights: RewardWeights,
        hinting: bool = False,
    ):
        self._next_job, self.environments = next_job, environments
        self._tools, self._settings, self._weights, self._hinting = tools, settings, weights, hinting
        self.verdicts = Verdicts()
        self._closed = threading.Event()
        self.error: BaseException | None = None
        self.busy = 0
        self._threads = [threading.Thread(target=self._run, args=(f"worker-{i}",), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Waits for what is under way, a moment."""
        self._closed.set()
        for thread in self._threads:
            thread.join(5)

    def _run(self, name: str) -> None:
        try:
            while not self._closed.is_set() and self.error is None:
                job = self._next_job(name)
                if job is None:
                    self._closed.wait(0.02)
                    continue
                self.busy += 1
                try:
                    self._carry_out(job)
                finally:
                    self.busy -= 1
        except BaseException as error:
            if not self._closed.is_set():
                self.error = error

    def _carry_out(self, job: Job) -> None:
        sandboxes = self.environments.current()
        try:
            model = job.model()
            fixed = self._tools, self._settings, self._weights
            rest = dict(on_end=job.on_end, verify=self.verdicts, hinting=self._hinting)
            rollout = roll_out(job.task(), model, sandboxes, *fixed, **rest)
            error = "" if rollout.solved is not None else f"{rollout.status}: {rollout.reward.error}"
        except (SandboxError, OSError) as raised:
            if isinstance(raised, OSError) and sandboxes.backend.alive():
                raise
            error = f"{type(raised).__name__}: {raised}"
        if self._closed.is_set():
            return
        if not error:
            job.done(rollout)
            return
        is_dead = not sandboxes.backend.alive()
        if is_dead:
            self.environments.renew(sandboxes)
        job.failed(error, not is_dead)
