"""What a sandbox is: the verbs, limits, capabilities and errors that every backend shares.

    with open_backend("namespaces") as backend:                       # rl.environments
        sandbox = backend.create(SandboxSpec(image=image))
        sandbox.write("/tmp/a.py", b"print(6 * 7)")
        sandbox.exec("python3 /tmp/a.py").stdout                     # b"42\\n"
        copy = sandbox.fork()                                         # the same files, a life of its own
        sandbox.destroy()                                             # also when called twice, also when it died

Every verb blocks, may be called from any thread, and ends: a command has a deadline, a sandbox has a lease that the backend
enforces on its own, whatever became of the client. What a *command* does wrong (exit 1, out of memory, too slow) is an
`ExecResult`; what the *file system inside* refuses is an `OSError` with its errno; what the *machinery* fails at is a
`SandboxError`, which is never a reward of zero.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Literal

TIMEOUT_EXIT = 124  # as timeout(1)


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. Written files are memory (a tmpfs): they may fill `disk_bytes` on top of `memory_bytes`."""

    memory_bytes: int = 1 << 30
    disk_bytes: int = 1 << 30  # of files written over the image
    inodes: int = 100_000
    pids: int = 256
    cpus: float = 1.0
    output_bytes: int = 64 << 10  # of each of a command's streams: the first and the last half are kept
    exec_s: float = 120.0  # default deadline of a command
    idle_s: float = 0.0  # default longest silence of a command; 0: any

    def __post_init__(self):
        for item in fields(self):
            if getattr(self, item.name) < (0 if item.name == "idle_s" else 1e-3):
                raise ValueError(f"{item.name} must be positive, got {getattr(self, item.name)}")


@dataclass(frozen=True)
class Capabilities:
    """What a backend keeps. Flags that are False are refused as `Unsupported`, or, for `create`, as `CannotIsolate`."""

    isolation: Literal["none", "namespaces", "container", "microvm", "simulated"]
    memory_limit: bool = False
    pids_limit: bool = False
    cpu_limit: bool = False
    disk_limit: bool = False
    no_network: bool = False  # nothing leaves: neither IP nor host sockets nor vsock
    own_uids: bool = False  # root inside is nobody outside
    syscall_filter: bool = False
    snapshot: bool = False  # of files
    memory_snapshot: bool = False  # of running processes, too
    fork: bool = False
    digests: bool = True  # equal files have equal digests
    egress: bool = False  # `Sandbox.host_pid` leads to a network namespace that a proxy can be put into


PROMISES = ("memory_limit", "pids_limit", "cpu_limit", "disk_limit", "no_network", "own_uids", "syscall_filter")


@dataclass(frozen=True)
class SandboxSpec:
    """What to create. `image`: a directory, an image's digest or name in the backend's store, or a `Snapshot`."""

    image: "str | Path | Snapshot" = ""
    limits: Limits = Limits()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    workdir: str = "/"
    lease_s: float = 3600.0  # hard: the backend destroys it then, unless renewed
    start_s: float = 30.0  # deadline of create
    tenant: str = "default"


@dataclass(frozen=True)
class Snapshot:
    """Files of a sandbox at one moment, kept by the backend: usable at once, durable when `durable()` says so."""

    id: str
    backend: "SandboxBackend" = field(repr=False, compare=False)

    def durable(self, timeout_s: float = 60.0) -> str:
        """Wait until every file is hashed and stored; the digest of the manifest, equal for equal files."""
        return self.backend.durable(self, timeout_s)

    def drop(self) -> None:
        """Forget it; sandboxes made from it live on."""
        self.backend.drop(self)


@dataclass(frozen=True)
class ExecResult:
    """How a command ended. `reason`: "exit", "signal" (128 + n), "timeout" (124), "idle" (124) or "oom" (137)."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    reason: Literal["exit", "signal", "timeout", "idle", "oom"] = "exit"
    dropped: int = 0  # bytes cut out of the middle of the two streams
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.reason == "exit"

    @property
    def text(self) -> str:
        """stdout and then stderr, with half characters at a cut and invalid bytes replaced."""
        return (self.stdout + self.stderr).decode(errors="replace")


class SandboxError(Exception):
    """The machinery failed, not the command. `retryable`: the same call may work, on another node at least."""

    retryable = False


class SandboxLost(SandboxError):
    """The sandbox is gone: destroyed, killed, or its node is. A new one may work."""

    retryable = True


class LeaseExpired(SandboxLost):
    """Its lease ran out and the backend destroyed it."""

    retryable = False


class NoCapacity(SandboxError):
    """The node has no room: memory, disk, processes, file descriptors or slots."""

    retryable = True


class StartTimeout(SandboxError):
    """`create` did not end within its deadline (a slow image, an overloaded node); nothing of it is left."""

    retryable = True


class CannotIsolate(SandboxError):
    """This machine cannot keep promises that were not waived; `missing` maps each to the reason."""

    def __init__(self, backend: str, missing: Mapping[str, str]):
        self.missing = dict(missing)
        reasons = "; ".join(f"{promise}: {reason}" for promise, reason in missing.items())
        super().__init__(f"the {backend} backend cannot keep here: {reasons} (allow={sorted(missing)} waives that)")


class ImageError(SandboxError):
    """The image does not exist or could not be built."""


class SnapshotError(SandboxError):
    """The snapshot is unknown, dropped, or its files do not match its manifest."""


class Unsupported(SandboxError, NotImplementedError):
    """This backend has no such verb; its capabilities say so."""


class Sandbox(ABC):
    """One isolated machine-like place. Made by `SandboxBackend.create`."""

    def __init__(self, id: str, spec: SandboxSpec):
        self.id, self.spec = id, spec
        self.deadline = time.monotonic() + spec.lease_s

    @abstractmethod
    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        idle_s: float | None = None,
        user: int = 0,
        output_bytes: int | None = None,
    ) -> ExecResult:
        """Run argv, or a line through `sh -c`; wait. After `timeout_s`, or `idle_s` without output, its whole tree is killed.

        stdin is these bytes and then its end, never a terminal. Processes it left in the background live on until `destroy`.
        """

    @abstractmethod
    def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """A regular file's bytes. OSError: ENOENT, EISDIR, EACCES, ..., EFBIG over `max_bytes`."""

    @abstractmethod
    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file as a whole: after an OSError (ENOSPC, ...) the old one is intact. Missing directories are made."""

    @abstractmethod
    def upload(self, source: Path, target: str) -> None:
        """Copy a host file or directory to `target` inside, links and modes kept, owned by root inside."""

    @abstractmethod
    def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        """Copy a file or directory out to `target`: nothing is written outside of it, whatever the sandbox sends."""

    def snapshot(self) -> Snapshot:
        """Its files now. Commands that run meanwhile are stopped for that moment."""
        raise Unsupported(f"{type(self).__name__} has no snapshots")

    def rollback(self, snapshot: Snapshot) -> None:
        """Its files as they were; every process in it ends."""
        raise Unsupported(f"{type(self).__name__} has no rollback")

    def fork(self) -> "Sandbox":
        """A new sandbox with these files, limits and lease."""
        raise Unsupported(f"{type(self).__name__} has no fork")

    def renew(self, lease_s: float) -> None:
        """Let the lease end `lease_s` seconds from now; SandboxLost if it is over."""
        self.check()
        self.deadline = time.monotonic() + lease_s

    @abstractmethod
    def check(self) -> None:
        """SandboxLost (or LeaseExpired) unless alive: the heartbeat."""

    @abstractmethod
    def destroy(self) -> None:
        """End every process, free everything it used. Any number of times."""

    @property
    def host_pid(self) -> int:
        """Its first process, seen from the host: /proc/PID/ns/net is its network. Only with capability `egress`."""
        raise Unsupported(f"{type(self).__name__} is not a process of this machine")

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.destroy()


class SandboxBackend(ABC):
    """Makes sandboxes on one node. Closing it destroys all that it made."""

    name: str
    capabilities: Capabilities

    @abstractmethod
    def create(self, spec: SandboxSpec) -> Sandbox:
        """A running sandbox; NoCapacity, ImageError, StartTimeout or CannotIsolate otherwise, and then nothing is left of it."""

    @abstractmethod
    def sandboxes(self) -> list[Sandbox]:
        """Those alive."""

    def alive(self) -> bool:
        """Whether its node is there; what made sandboxes before may make none any more."""
        return True

    def durable(self, snapshot: Snapshot, timeout_s: float) -> str:
        raise Unsupported(f"{self.name} has no snapshots")

    def drop(self, snapshot: Snapshot) -> None:
        raise Unsupported(f"{self.name} has no snapshots")

    @abstractmethod
    def close(self) -> None:
        """Destroy every sandbox, free everything. Any number of times."""

    def __enter__(self) -> "SandboxBackend":
        return self

    def __exit__(self, *_) -> None:
        self.close()
