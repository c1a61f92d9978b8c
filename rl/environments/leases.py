"""Leases: one thread per backend that destroys what outlives its deadline, whatever became of the client."""

import threading
import time
from collections.abc import Callable, Iterable

from rl.environments.sandbox import Sandbox

PERIOD = 0.2  # seconds


class LeaseKeeper:
    """Calls `expire(sandbox)` once its deadline (monotonic: a jump of the wall clock changes nothing) is past."""

    def __init__(self, sandboxes: Callable[[], Iterable[Sandbox]], expire: Callable[[Sandbox], None]):
        self._sandboxes, self._expire = sandboxes, expire
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            now = time.monotonic()
            for sandbox in list(self._sandboxes()):
                if now >= sandbox.deadline:
                    self._expire(sandbox)

    def close(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
