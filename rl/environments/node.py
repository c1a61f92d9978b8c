"""One machine's `sandboxd`: its process, its range of user ids, its directory, and the reaper of nodes that died.

A node's name is `<pid>-<start time>-<count>` of the Python process that owns it, so that whether it is alive can be asked of the
kernel. What a killed node can leave is: cgroups, and an empty directory. The next node that starts removes them.
"""

import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from rl.environments import cgroups
from rl.environments.sandbox import CannotIsolate, SandboxError, SandboxLost
from rl.environments.served import Refused, ask, pair, strings

PROGRAM = Path(__file__).with_name("sandboxd")
SLOTS, UIDS, RANGES = 4096, 65536, 14  # of a node; of a slot; ranges of SLOTS * UIDS ids on a machine
FIRST_UID = 1 << 24
counter = itertools.count()


def start_time(pid: int) -> str:
    """In clock ticks after boot; with the pid it names a process for good."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]


def is_alive(name: str) -> bool:
    pid, _, rest = name.partition("-")
    try:
        return start_time(int(pid)) == rest.split("-")[0]
    except (OSError, ValueError, IndexError):
        return False


class Node:
    """A running sandboxd and what it owns. `close` frees all; so does the death of this process, up to the reaper."""

    def __init__(self, directory: Path | None = None):
        if os.geteuid() != 0:
            raise CannotIsolate("namespaces", {"own_uids": "needs root (the bubblewrap backend does not)"})
        if not PROGRAM.exists():
            raise SandboxError(f"{PROGRAM.name} is not built; install the package with a C++ compiler on Linux")
        self.top = Path(directory or Path(tempfile.gettempdir()) / "anyrun-0")
        self.top.mkdir(mode=0o700, exist_ok=True)
        if self.top.stat().st_uid != 0:
            raise SandboxError(f"{self.top} belongs to somebody else")
        self.name = f"{os.getpid()}-{start_time(os.getpid())}-{next(counter)}"
        self.reaped = self.reap()
        self._lock, self.first_uid = self._take_uids()
        self.layers = self.top / self.name / "layers"
        self.layers.mkdir(parents=True)
        self.cgroups = cgroups.find().with_node(self.name)
        ours, theirs = pair()
        with theirs:
            command = [str(PROGRAM), "node", str(theirs.fileno()), str(self.layers)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.socket = ours
        try:
            answer = ours.recv(4096)
            strings(answer)
        except SandboxError as error:
            self.close()
            raise CannotIsolate("namespaces", {"own_uids": str(error)}) from error
        except BaseException:
            self.close()
            raise

    def reap(self) -> int:
        """Remove what dead nodes left; how many things."""
        removed = cgroups.remove_stale(cgroups.find(), is_alive)
        for entry in self.top.iterdir():
            if "-" in entry.name and not is_alive(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
                removed += 1
        return removed

    def _take_uids(self) -> tuple[int, int]:
        """A range of user ids that no other node of this machine has: (descriptor that holds it, first id)."""
        for index in range(RANGES):
            fd = os.open(self.top / f"uids.{index}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd, FIRST_UID + index * SLOTS * UIDS
            except BlockingIOError:
                os.close(fd)
        raise SandboxError(f"{RANGES} nodes run on this machine already")

    def uid(self, slot: int) -> int:
        return self.first_uid + slot * UIDS

    def ask(self, *fields: str, timeout_s: float = 30.0) -> list[str]:
        try:
            return ask(self.socket, list(fields), timeout_s=timeout_s)
        except (Refused, TimeoutError):
            raise
        except (SandboxError, OSError) as error:
            raise SandboxLost(f"the node {self.name} is gone") from error

    def files(self, layer: str) -> Path:
        """Where this process sees a layer's files."""
        return Path(f"/proc/{self.process.pid}/root") / self.layers.relative_to("/") / layer / "u"

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.socket.close()  # sandboxd then ends all that is left, and itself
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.cgroups.remove_node()
        shutil.rmtree(self.layers.parent, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)
        self._lock = -1
