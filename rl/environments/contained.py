"""Backends whose isolation another program builds (bwrap, runc): it starts `sandboxd serve`, which then serves the verbs.

The image is the root, read-only and shared; WRITABLE places that are empty there and the working directory are tmpfs of the
sandbox's own. So there is nothing to copy, and no snapshots either. A sandbox ends with its control socket, and so with this
process.
"""

import itertools
import os
import secrets
import socket
import subprocess
import threading
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path

from rl.environments.leases import LeaseKeeper
from rl.environments.node import PROGRAM
from rl.environments.sandbox import (
    PROMISES,
    CannotIsolate,
    ImageError,
    NoCapacity,
    SandboxBackend,
    SandboxError,
    SandboxLost,
    SandboxSpec,
    Snapshot,
    StartTimeout,
)
from rl.environments.served import ServedSandbox, pair, strings

WRITABLE = ("/tmp", "/root", "/home", "/var/tmp", "/run")
INSIDE = "/run/sandboxd"  # where the program is for the sandbox
END_S = 5.0


class ContainedSandbox(ServedSandbox):
    def __init__(self, id: str, spec: SandboxSpec, control: socket.socket, process: subprocess.Popen, backend: "ContainedBackend"):
        super().__init__(id, spec, control)
        self.process, self._backend = process, backend

    def _free(self, why):
        self._backend._alive.pop(self.id, None)
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # the server's end of file, also while another thread has it in use
        self._control.close()
        self._backend._ended(self.id, self.process)


class ContainedBackend(SandboxBackend):
    """Subclasses say how a sandbox is started: `_start`, and what is left to clean up: `_ended`."""

    def __init__(self, allow, missing: dict[str, str]):
        allow = PROMISES if allow == "all" else tuple(allow)
        if refused := {promise: reason for promise, reason in missing.items() if promise not in allow}:
            raise CannotIsolate(self.name, refused)
        if not PROGRAM.exists():
            raise SandboxError(f"{PROGRAM.name} is not built; install the package with a C++ compiler on Linux")
        self._alive: dict[str, ContainedSandbox] = {}
        self._count, self._lock = itertools.count(), threading.Lock()
        self._keeper = LeaseKeeper(lambda: list(self._alive.values()), lambda sandbox: sandbox._end("its lease ended"))

    @abstractmethod
    def _start(self, id: str, spec: SandboxSpec, image: Path, server: int) -> subprocess.Popen:
        """Run `INSIDE serve SERVER` isolated; its errors on the process' stderr."""

    def _ended(self, id: str, process: subprocess.Popen) -> None:
        """Its control socket is closed: end what is left."""
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()

    def create(self, spec):
        if isinstance(spec.image, Snapshot) or not spec.image or not Path(spec.image).is_dir():
            raise ImageError(f"image must be a directory, got {str(spec.image)!r}")
        id = f"{self.name}-{secrets.token_hex(4)}-{next(self._count)}"
        ours, theirs = pair()
        with theirs:
            process = self._start(id, spec, Path(spec.image).resolve(), theirs.fileno())
        try:
            ours.settimeout(spec.start_s)
            strings(ours.recv(4096))
        except (SandboxError, OSError) as error:
            ours.close()
            process.kill()
            message = process.stderr.read().decode(errors="replace").strip()[-500:]
            self._ended(id, process)
            if isinstance(error, TimeoutError):
                raise StartTimeout(f"not started after {spec.start_s} s") from error
            if isinstance(error, SandboxLost):
                raise NoCapacity(f"{self.name} did not start it: {message}") from error
            raise
        ours.settimeout(None)
        sandbox = self._alive[id] = ContainedSandbox(id, spec, ours, process, self)
        return sandbox

    def sandboxes(self):
        return list(self._alive.values())

    def close(self):
        for sandbox in self.sandboxes():
            sandbox.destroy()
        self._keeper.close()


def writable_places(spec: SandboxSpec, image: Path) -> list[str]:
    """Those that hide no file of the image, /tmp, /run, and the working directory; without those below others."""
    workdir = os.path.normpath(f"/{spec.workdir}")
    places = [place for place in WRITABLE if place in ("/tmp", "/run") or not any((image / place[1:]).glob("*"))]
    extra = [workdir] if workdir != "/" and not any(f"{workdir}/".startswith(f"{place}/") for place in places) else []
    return [*places, *extra]
