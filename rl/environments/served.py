"""A sandbox whose first process is `sandboxd`'s server: the verbs as requests to it (csrc/sandbox/serve.h has the format).

Each request carries a socket of its own for the answer: threads do not wait for each other, a server that died is an end of file,
and a client that died ends its command.
"""

import errno
import io
import os
import socket
import struct
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.version_info >= (3, 11, 4):
    import tarfile
else:  # Debian 12's 3.11.2 has no extraction filters
    from backports import tarfile

from rl.environments.capture import join
from rl.environments.sandbox import (
    TIMEOUT_EXIT,
    ExecResult,
    LeaseExpired,
    Sandbox,
    SandboxError,
    SandboxLost,
    SandboxSpec,
)

ANSWER = struct.Struct("=IiIIIIIIQQ")
MAGIC, REASONS = 0x62784178, ("exit", "timeout", "idle")
MAX_OUTPUT = 4 << 20
MAX_REQUEST = 192 << 10
GRACE_S = 5.0  # more than the server needs to kill what is too late
SO_SNDBUFFORCE = 32
STDIN, STDOUT = 1, 2


class Refused(SandboxError):
    """What sandboxd answered: the step that failed, and its errno."""

    def __init__(self, errno: int, step: str):
        super().__init__(f"{step}: {os.strerror(errno)}")
        self.errno, self.step = errno, step


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def ask(control: socket.socket, fields: list[str | bytes], fds=(), timeout_s: float | None = None) -> list[str]:
    """Request with one short answer: its strings. SandboxLost at an end of file, TimeoutError, SandboxError for "error"."""
    ours, theirs = pair()
    with ours, theirs:
        send(control, fields, [theirs.fileno(), *fds])
        theirs.close()
        ours.settimeout(timeout_s)
        return strings(ours.recv(4096))


def strings(answer: bytes) -> list[str]:
    if not answer:
        raise SandboxLost("it ended before it answered")
    fields = answer.decode(errors="replace").rstrip("\0").split("\0")
    if fields[0] == "error":
        raise Refused(int(fields[1]), fields[2])
    return fields


def send(control: socket.socket, fields: list[str | bytes], fds: list[int]) -> None:
    parts = [os.fsencode(field) for field in fields]
    if any(b"\0" in part for part in parts):
        raise ValueError("a command, path or variable must have no NUL in it")
    message = b"\0".join(parts) + b"\0"
    if len(message) > MAX_REQUEST:
        raise OSError(7, f"command and environment must be below {MAX_REQUEST} bytes, got {len(message)}; write a file")
    try:
        socket.send_fds(control, [message], fds)
    except (BrokenPipeError, ConnectionError) as error:
        raise SandboxLost("it has ended") from error


class ServedSandbox(Sandbox):
    """Subclasses give `_free(why)`, which ends and frees it once, and may give `_was_oom`."""

    def __init__(self, id: str, spec: SandboxSpec, control: socket.socket):
        super().__init__(id, spec)
        self._control = control
        self._lost: str | None = None
        self._gate = threading.Condition()  # guards the next two
        self._running = 0  # requests on their way
        self._closed = False  # no new ones: its root is being replaced

    def _free(self, why: str) -> None:
        raise NotImplementedError

    def _was_oom(self) -> bool:
        """Whether the kernel killed for memory since the last time this was asked."""
        return False

    def check(self):
        if self._lost is None:
            with suppress(BlockingIOError, OSError):
                if self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    self._end("its first process ended")
        if self._lost is not None:
            raise (LeaseExpired if self._lost == "its lease ended" else SandboxLost)(f"{self.id}: {self._lost}")

    def destroy(self):
        self._end("destroyed")

    def _end(self, why: str) -> None:
        with self._gate:
            if self._lost is not None:
                return
            self._lost = why
        self._free(why)

    def exec(self, command, *, cwd=None, env=None, stdin=b"", timeout_s=None, idle_s=None, user=0, output_bytes=None):
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        variables = {"HOME": "/root" if user == 0 else "/tmp", "LANG": "C.UTF-8", **self.spec.env, **(env or {})}
        with self._given(stdin) as given:
            return self._request(
                ["exec"],
                [f"{key}={value}" for key, value in variables.items()],
                argv,
                given,
                STDIN if given else 0,
                cwd=cwd or self.spec.workdir,
                user=user,
                timeout_s=timeout_s,
                idle_s=idle_s,
                output_bytes=output_bytes,
            )

    def read(self, path, *, max_bytes=64 << 20):
        with _memory_file(b"") as fd:
            self._file_verb("read", [self._absolute(path), str(max_bytes)], fd, STDOUT, path)
            with open(fd, "rb", closefd=False) as file:
                file.seek(0)
                return file.read(max_bytes)

    def write(self, path, data, *, mode=0o644):
        with _memory_file(data) as fd:
            self._file_verb("write", [self._absolute(path), f"{mode:o}"], fd, STDIN, path)

    def upload(self, source, target):
        """As a tar stream through the image's own tar; a single file needs none."""
        source = Path(source)
        if not source.is_dir():
            return self.write(target, source.read_bytes(), mode=source.stat().st_mode & 0o7777)
        target = self._absolute(target)
        result = self.exec(["sh", "-c", 'mkdir -p "$1" && tar -xf - -C "$1"', "sh", target], stdin=pack(source))
        if not result.ok:
            raise OSError(28 if b"No space" in result.stderr else 5, result.text.strip(), target)

    def download(self, source, target, *, max_bytes=1 << 30):
        source, target = self._absolute(source), Path(target)
        kind = self.exec(["sh", "-c", 'if [ -d "$1" ]; then echo directory; fi', "sh", source])
        if kind.stdout != b"directory\n":
            target.write_bytes(self.read(source, max_bytes=max_bytes))
            return
        with _memory_file(b"") as fd:
            status = self._request(["exec"], [], ["tar", "-cf", "-", "-C", source, "."], [fd], STDOUT)
            if not status.ok:
                raise OSError(5, status.text.strip(), source)
            if os.fstat(fd).st_size > max_bytes:
                raise OSError(27, os.strerror(27), source)
            with open(fd, "rb", closefd=False) as file:
                file.seek(0)
                unpack(file, target)

    def export_root(self, archive: Path) -> None:
        """All its files as one tar, written by the image's own tar straight into a host file."""
        with open(archive, "wb") as file:
            command = ["tar", "-cf", "-", "--one-file-system", "--numeric-owner", "-C", "/", "."]
            done = self._request(["exec"], [], command, [file.fileno()], STDOUT)
        if not done.ok:
            raise OSError(5, done.text.strip(), str(archive))

    def _absolute(self, path: str) -> str:
        return os.path.join(self.spec.workdir, path)

    def _file_verb(self, verb: str, arguments: list[str], fd: int, which: int, path: str) -> None:
        result = self._request([verb], [], arguments, [fd], which)
        if result.reason != "exit":
            code = {"timeout": 110, "idle": 110, "oom": 12}.get(result.reason, 5)
            raise OSError(code, f"{verb} ended by {result.reason}", path)
        if result.exit_code:
            raise OSError(result.exit_code, os.strerror(result.exit_code), path)

    @contextmanager
    def _given(self, stdin: bytes):
        if not stdin:
            yield []
            return
        with _memory_file(stdin) as fd:
            yield [fd]

    @contextmanager
    def _passing(self):
        """While a request runs: roots are not replaced under it."""
        with self._gate:
            while self._closed:
                self._gate.wait()
            self._running += 1
        try:
            yield
        finally:
            with self._gate:
                self._running -= 1

    def _request(
        self, verb, variables, arguments, fds, which, *, cwd="/", user=0, timeout_s=None, idle_s=None, output_bytes=None
    ) -> ExecResult:
        self.check()
        limits = self.spec.limits
        timeout_s = limits.exec_s if timeout_s is None else timeout_s
        idle_s = limits.idle_s if idle_s is None else idle_s
        cap = min(output_bytes or limits.output_bytes, MAX_OUTPUT)
        numbers = (user, max(1, int(timeout_s * 1e3)), int(idle_s * 1e3), cap, which, len(variables))
        ours, theirs = pair()
        with self._passing(), ours, theirs:
            for option in (SO_SNDBUFFORCE, socket.SO_SNDBUF) if cap > 64 << 10 else ():
                with suppress(PermissionError):
                    theirs.setsockopt(socket.SOL_SOCKET, option, 4 * cap + (128 << 10))
            start = time.monotonic()
            try:
                send(self._control, [*verb, cwd, *map(str, numbers), *variables, *arguments], [theirs.fileno(), *fds])
                theirs.close()
                ours.settimeout(timeout_s + GRACE_S)
                answer = _whole_answer(ours)
            except SandboxLost:
                self._end("its first process ended")
                self.check()
            except TimeoutError:
                self._end("it stopped answering")
                self.check()
            seconds = time.monotonic() - start
        return self._result(answer, seconds)

    def _result(self, answer: bytes, seconds: float) -> ExecResult:
        _, status, why, out_size, _, out_head, err_head, _, out_dropped, err_dropped = ANSWER.unpack_from(answer)
        out, err = answer[ANSWER.size : ANSWER.size + out_size], answer[ANSWER.size + out_size :]
        code, reason = os.waitstatus_to_exitcode(status), REASONS[why]
        if reason != "exit":
            code = TIMEOUT_EXIT
        elif code in (-9, 137) and self._was_oom():
            code, reason = 137, "oom"
        elif code < 0:
            code, reason = 128 - code, "signal"
        stdout = join(out[:out_head], out[out_head:], out_dropped)
        stderr = join(err[:err_head], err[err_head:], err_dropped)
        return ExecResult(code, stdout, stderr, reason, out_dropped + err_dropped, seconds)


def _whole_answer(reply: socket.socket) -> bytes:
    """All packets of one answer. What a sandbox sends is not trusted: sizes are bounded, an odd one is a lost sandbox."""
    first = reply.recv(64 << 10)
    if len(first) < ANSWER.size or ANSWER.unpack_from(first)[0] != MAGIC:
        strings(first)  # an error, or nothing
        raise SandboxLost("it answered nonsense")
    _, _, why, out_size, err_size, *_ = ANSWER.unpack_from(first)
    if out_size > MAX_OUTPUT or err_size > MAX_OUTPUT or why >= len(REASONS):
        raise SandboxLost("it answered nonsense")
    parts, missing = [first], ANSWER.size + out_size + err_size - len(first)
    while missing > 0:
        part = reply.recv(64 << 10)
        if not part:
            raise SandboxLost("it ended while it answered")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


@contextmanager
def _memory_file(data: bytes):
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def pack(source: Path) -> bytes:
    """A directory as a tar, owned by root."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(source, ".", filter=_owned_by_root)
    return stream.getvalue()


def unpack(file, target: Path) -> None:
    """A tar that nobody vouches for: links and paths that lead out of `target`, devices and set-id bits are refused (EPERM)."""
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            archive.extractall(target, filter="data")
    except tarfile.TarError as error:
        raise OSError(errno.EPERM, f"not taken out of the sandbox: {error}", str(target)) from error


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
