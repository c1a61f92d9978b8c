"""Plain processes of this machine in a directory of their own: NO isolation. For tests, and refused unless it is allowed.

Paths given to the file verbs are relative to the directory ("/a/b" is a/b in it) and never lead out of it, whatever symbolic links
say (openat2). Commands run with it as working directory and $HOME, as the current user, and can read and write the whole machine.
"""

import ctypes
import errno
import itertools
import os
import secrets
import shutil
import signal
import stat
import struct
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from rl.environments import capture
from rl.environments.leases import LeaseKeeper
from rl.environments.manifest import manifest, manifest_digest
from rl.environments.sandbox import (
    PROMISES,
    CannotIsolate,
    Capabilities,
    ExecResult,
    ImageError,
    LeaseExpired,
    Sandbox,
    SandboxBackend,
    SandboxLost,
    SandboxSpec,
    Snapshot,
    SnapshotError,
)

OPENAT2, RESOLVE_NO_MAGICLINKS, RESOLVE_BENEATH = 437, 0x02, 0x08
MARK = "ANYRUN_SANDBOX"  # in the environment of every process of a sandbox
KILL_S = 2.0
libc = ctypes.CDLL(None, use_errno=True)


def open_beneath(root: int, path: str, flags: int, mode: int = 0) -> int:
    """open(2) below a directory; OSError (EXDEV) where a link or ".." would lead out. No race: the kernel walks."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    fd = libc.syscall(OPENAT2, root, os.fsencode(path), how, len(how))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return fd


def marked(value: str) -> list[int]:
    """Processes whose environment has MARK=value..., wherever they were re-parented."""
    found, wanted = [], f"{MARK}={value}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if any(entry.startswith(wanted) for entry in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")):
                found.append(int(name))
    return found


def kill_marked(value: str) -> None:
    end = time.monotonic() + KILL_S
    while (found := marked(value)) and time.monotonic() < end:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


class SubprocessSandbox(Sandbox):
    def __init__(self, id: str, spec: SandboxSpec, root: Path, backend: "Subprocess"):
        super().__init__(id, spec)
        self.root, self._backend = root, backend
        self._lost: str | None = None
        self._count, self._lock = itertools.count(), threading.Lock()

    def check(self):
        if self._lost:
            raise (LeaseExpired if self._lost == "its lease ended" else SandboxLost)(f"{self.id}: {self._lost}")

    def exec(self, command, *, cwd=None, env=None, stdin=b"", timeout_s=None, idle_s=None, user=0, output_bytes=None):
        self.check()
        limits, mark = self.spec.limits, f"{self.id}.{next(self._count)}."
        base = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.root), "LANG": "C.UTF-8"}
        with self._open(cwd or self.spec.workdir, os.O_DIRECTORY) as directory:
            try:
                result = capture.run(
                    ["sh", "-c", command] if isinstance(command, str) else list(command),
                    cwd=f"/proc/{os.getpid()}/fd/{directory}",
                    env={**base, **self.spec.env, **(env or {}), MARK: mark},
                    stdin=stdin,
                    timeout_s=limits.exec_s if timeout_s is None else timeout_s,
                    idle_s=limits.idle_s if idle_s is None else idle_s,
                    output_bytes=output_bytes or limits.output_bytes,
                    kill=lambda _: kill_marked(mark),
                )
            except (FileNotFoundError, PermissionError, NotADirectoryError) as error:  # as a shell says it
                result = ExecResult(127 if isinstance(error, FileNotFoundError) else 126, stderr=f"{error}\n".encode())
        self.check()  # killed by destroy: that is no result
        return result

    def read(self, path, *, max_bytes=64 << 20):
        with self._open(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
                raise OSError(code, os.strerror(code), path)
            with open(fd, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        return data

    def write(self, path, data, *, mode=0o644):
        with self._made(os.path.dirname(self._resolved(path))) as directory:
            name, partial = os.path.basename(self._resolved(path)), f".{secrets.token_hex(8)}"
            if name in ("", ".", "..") or stat.S_ISDIR(_mode(name, directory)):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            try:
                with open(partial, "wb", opener=lambda *_: os.open(partial, WRITE_NEW, mode, dir_fd=directory)) as file:
                    file.write(data)
                os.replace(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                with suppress(OSError):
                    os.unlink(partial, dir_fd=directory)
                raise

    def upload(self, source, target):
        self.check()
        source = Path(source)
        if source.is_dir():
            with self._made(target) as directory:
                shutil.copytree(source, f"/proc/self/fd/{directory}", symlinks=True, dirs_exist_ok=True)
        else:
            self.write(target, source.read_bytes(), mode=stat.S_IMODE(source.stat().st_mode))

    def download(self, source, target, *, max_bytes=1 << 30):
        with self._open(source, os.O_PATH) as fd:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                Path(target).write_bytes(self.read(source, max_bytes=max_bytes))
                return
            shutil.copytree(f"/proc/self/fd/{fd}", target, symlinks=True, dirs_exist_ok=True)

    def snapshot(self):
        self.check()
        return self._backend._keep(self.root)

    def rollback(self, snapshot):
        kept = self._backend._kept(snapshot)
        self.check()
        kill_marked(f"{self.id}.")
        for entry in os.scandir(self.root):
            shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
        shutil.copytree(kept, self.root, symlinks=True, dirs_exist_ok=True)

    def fork(self):
        self.check()
        return self._backend._create(self.spec, self.root)

    def destroy(self):
        self._end("destroyed")

    def _end(self, why: str) -> None:
        with self._lock:
            if self._lost:
                return
            self._lost = why
        kill_marked(f"{self.id}.")
        shutil.rmtree(self.root, ignore_errors=True)
        self._backend._alive.pop(self.id, None)

    @contextmanager
    def _open(self, path: str, flags: int):
        """A descriptor below the root."""
        self.check()
        root = os.open(self.root, os.O_PATH)
        try:
            fd = open_beneath(root, _relative(path), flags)
        finally:
            os.close(root)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _made(self, path: str):
        """A descriptor of a directory that is made where it is missing."""
        made = "."
        for part in _relative(path).split("/"):
            with self._open(made, os.O_DIRECTORY) as parent, suppress(FileExistsError):
                os.mkdir(part, dir_fd=parent)
            made = f"{made}/{part}"
        with self._open(made, os.O_DIRECTORY) as directory:
            yield directory

    def _resolved(self, path: str) -> str:
        """The path behind symbolic links that stay inside; OSError where they lead out, or nowhere."""
        try:
            with self._open(path, os.O_PATH) as fd:
                return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), os.path.realpath(self.root))
        except FileNotFoundError:
            if os.path.islink(self.root / _relative(path)):
                raise
            return _relative(path)


WRITE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _relative(path: str) -> str:
    return path.lstrip("/") or "."


def _mode(name: str, directory: int) -> int:
    try:
        return os.stat(name, dir_fd=directory).st_mode
    except FileNotFoundError:
        return 0


class Subprocess(SandboxBackend):
    """`allow` must name every promise, or be "all": none is kept. Images and snapshots are directories that are copied."""

    name = "subprocess"
    capabilities = Capabilities(isolation="none", snapshot=True, fork=True)

    def __init__(self, allow=(), directory: Path | None = None):
        missing = {promise: "commands are plain processes" for promise in PROMISES if allow != "all" and promise not in allow}
        if missing:
            raise CannotIsolate(self.name, missing)
        self._directory = Path(tempfile.mkdtemp(prefix="sandboxes-", dir=directory))
        self._alive: dict[str, SubprocessSandbox] = {}
        self._count = itertools.count()
        self._keeper = LeaseKeeper(lambda: list(self._alive.values()), lambda sandbox: sandbox._end("its lease ended"))

    def create(self, spec):
        image = spec.image
        if isinstance(image, Snapshot):
            image = self._kept(image)
        elif image and not Path(image).is_dir():
            raise ImageError(f"image must be a directory, got {image!r}")
        return self._create(spec, Path(image) if image else None)

    def _create(self, spec: SandboxSpec, source: Path | None) -> SubprocessSandbox:
        id = f"{secrets.token_hex(4)}-{next(self._count)}"
        root = self._directory / id
        root.mkdir()
        if source:
            shutil.copytree(source, root, symlinks=True, dirs_exist_ok=True)
        (root / _relative(spec.workdir)).mkdir(parents=True, exist_ok=True)
        sandbox = self._alive[id] = SubprocessSandbox(id, spec, root, self)
        return sandbox

    def sandboxes(self):
        return list(self._alive.values())

    def _keep(self, root: Path) -> Snapshot:
        id = f"snapshot-{next(self._count)}"
        shutil.copytree(root, self._directory / id, symlinks=True)
        return Snapshot(id, self)

    def _kept(self, snapshot: Snapshot) -> Path:
        kept = self._directory / snapshot.id
        if snapshot.backend is not self or not kept.is_dir():
            raise SnapshotError(f"{snapshot.id} is no snapshot of this backend, or was dropped")
        return kept

    def durable(self, snapshot, timeout_s):
        return manifest_digest(manifest(self._kept(snapshot)))

    def drop(self, snapshot):
        shutil.rmtree(self._directory / snapshot.id, ignore_errors=True)

    def close(self):
        for sandbox in self.sandboxes():
            sandbox.destroy()
        self._keeper.close()
        shutil.rmtree(self._directory, ignore_errors=True)
