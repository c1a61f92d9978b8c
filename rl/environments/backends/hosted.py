"""A hosted service with E2B's API: a sandbox is a microVM elsewhere, with a kernel of its own.

Two sides, over HTTP: the service (create, lease, snapshots, end), and in each sandbox its agent `envd` (files, and processes as
a Connect stream of JSON envelopes). Field names are those of the e2b package 2.63. The agent kills one process, and ends a command
only when nobody holds its output any more, so a shell around each command tells when it ended, and a deadline kills by an
environment variable that every process of the command has.
"""

import base64
import errno
import io
import itertools
import json
import math
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx

from rl.environments.capture import HeadTail
from rl.environments.leases import LeaseKeeper
from rl.environments.sandbox import (
    PROMISES,
    TIMEOUT_EXIT,
    CannotIsolate,
    Capabilities,
    ExecResult,
    ImageError,
    LeaseExpired,
    NoCapacity,
    Sandbox,
    SandboxBackend,
    SandboxError,
    SandboxLost,
    SandboxSpec,
    Snapshot,
    SnapshotError,
    StartTimeout,
)
from rl.environments.served import pack, unpack

MARK = "ANYRUN_COMMAND"
ENVELOPE, LAST = struct.Struct(">BI"), 2  # Connect: flags, length; the flag of the last one
MAX_EVENT = 16 << 20
REQUEST_S, GRACE_S = 30.0, 10.0
MISSING = dict.fromkeys(("memory_limit", "pids_limit", "cpu_limit", "disk_limit"), "the service's template decides its size")

COMMAND = r"""
nonce=$1 input=$2; shift 2
"$@" < "$input"
code=$?
printf '\0%s %s\0' "$nonce" "$code"; printf '\0%s %s\0' "$nonce" "$code" >&2
"""
KILL = r"""
for round in 1 2 3; do
  for file in $(grep -lsaF "$1" /proc/[0-9]*/environ); do p=${file#/proc/}; kill -9 "${p%/environ}"; done
done 2> /dev/null
"""
LOOK = r"""
[ -e "$1" ] || exit 2
[ -d "$1" ] && exit 21
[ -f "$1" ] || exit 22
[ "$(stat -Lc %s -- "$1")" -le "$2" ] || exit 27
"""
PLACE = r"""
new=$1 target=$2 partial=; trap 'rm -f -- "$new" ${partial:+"$partial"}' EXIT
if [ -L "$target" ]; then target=$(readlink -f -- "$target") || exit 2; fi
[ -d "$target" ] && exit 21
mkdir -p -- "$(dirname -- "$target")" || exit 20
partial=$(dirname -- "$target")/.$4
cp -- "$new" "$partial" || exit 28
chmod "$3" "$partial" && mv -f -- "$partial" "$target" || exit 5
"""  # exit statuses are errno: ENOENT, EISDIR, EINVAL, EFBIG, ENOTDIR, ENOSPC, EIO


class Stream:
    """One of a command's streams, up to the mark that COMMAND puts after it."""

    def __init__(self, nonce: str, cap: int):
        self._mark, self._kept, self._held = f"\0{nonce} ".encode(), HeadTail(cap), b""
        self.code: int | None = None

    def add(self, data: bytes) -> None:
        self._held += data
        at = self._held.find(self._mark)
        if at >= 0:
            code, ended, _ = self._held[at + len(self._mark) :].partition(b"\0")
            self.code = int(code) if ended else None
            return
        sure = max(0, len(self._held) - len(self._mark) + 1)
        self._kept.add(self._held[:sure])
        self._held = self._held[sure:]

    def end(self) -> tuple[bytes, int]:
        self._kept.add(self._held.partition(self._mark)[0])
        return self._kept.join(), self._kept.dropped


class Watch:
    """Calls `kill` once when a command is too late or too long silent; `reason` says which."""

    def __init__(self, timeout_s: float, idle_s: float, kill: Callable[[], None]):
        self.reason, self.last = "exit", time.monotonic()
        self._end, self._idle_s, self._kill, self._over = self.last + timeout_s, idle_s, kill, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            due, reason = self._end, "timeout"
            if self._idle_s and self.last + self._idle_s < due:
                due, reason = self.last + self._idle_s, "idle"
            if self._over.wait(max(0.0, due - time.monotonic())):
                return
            if due <= time.monotonic() and (reason == "timeout" or self.last + self._idle_s <= time.monotonic()):
                self.reason = reason
                with suppress(SandboxError):
                    self._kill()
                return

    def close(self) -> None:
        """After a kill that has begun."""
        self._over.set()
        self._thread.join()


class Envd:
    """The agent in one sandbox."""

    def __init__(self, client: httpx.Client, url: str, token: str | None):
        self._client, self._url = client, url
        self._headers = {"X-Access-Token": token} if token else {}

    def healthy(self) -> bool:
        with suppress(httpx.HTTPError):
            return self._client.get(f"{self._url}/health", headers=self._headers).status_code < 300
        return False

    def read(self, path: str) -> bytes:
        answer = self._client.get(f"{self._url}/files", params={"path": path, "username": "root"}, headers=self._headers)
        return answer.raise_for_status().content

    def write(self, path: str, data: bytes) -> None:
        query, files = {"path": path, "username": "root"}, {"file": (os.path.basename(path), data)}
        answer = self._client.post(f"{self._url}/files", params=query, files=files, headers=self._headers)
        if answer.status_code == 507:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        answer.raise_for_status()

    def start(self, argv: Sequence[str], env: dict, cwd: str, user: int, silent_s: float):
        """Events of a process: dicts with one of start, data, end, keepalive."""
        process = {"cmd": argv[0], "args": list(argv[1:]), "envs": env, "cwd": cwd}
        body = json.dumps({"process": process, "stdin": False}).encode()
        basic = base64.b64encode(b"root:" if user == 0 else b"user:").decode()
        headers = self._headers | {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Authorization": f"Basic {basic}",
        }
        timeout = httpx.Timeout(REQUEST_S, read=silent_s)
        url, content = f"{self._url}/process.Process/Start", ENVELOPE.pack(0, len(body)) + body
        with self._client.stream("POST", url, content=content, headers=headers, timeout=timeout) as answer:
            answer.raise_for_status()
            yield from _events(answer.iter_raw())


def _events(chunks):
    held = b""
    for chunk in chunks:
        held += chunk
        while len(held) >= ENVELOPE.size:
            flags, size = ENVELOPE.unpack_from(held)
            if size > MAX_EVENT:
                raise SandboxError("the sandbox's agent sent an event of an impossible size")
            if len(held) < ENVELOPE.size + size:
                break
            message, held = json.loads(held[ENVELOPE.size : ENVELOPE.size + size]), held[ENVELOPE.size + size :]
            if flags & LAST:
                if "error" in message:
                    raise OSError(errno.EINVAL, message["error"].get("message", "refused"))
                return
            yield message.get("event", {})


class HostedSandbox(Sandbox):
    def __init__(self, id: str, spec: SandboxSpec, remote: str, envd: Envd, backend: "Hosted"):
        super().__init__(id, spec)
        self.remote, self._envd, self._backend = remote, envd, backend
        self._lost: str | None = None
        self._count, self._lock = itertools.count(), threading.Lock()

    def check(self):
        if self._lost is None and not self._envd.healthy():
            self._end("its agent does not answer")
        self._check_known()

    def _check_known(self) -> None:
        """Without asking."""
        if self._lost is not None:
            raise (LeaseExpired if self._lost == "its lease ended" else SandboxLost)(f"{self.id}: {self._lost}")

    @contextmanager
    def _talking(self):
        """Turns what goes wrong with the connection into what it means for the sandbox."""
        self._check_known()
        try:
            yield
        except httpx.HTTPError as error:
            self.check()
            raise SandboxError(f"{self.id}: {error}") from error

    def exec(self, command, *, cwd=None, env=None, stdin=b"", timeout_s=None, idle_s=None, user=0, output_bytes=None):
        limits, start, nonce = self.spec.limits, time.monotonic(), secrets.token_hex(8)
        timeout_s = limits.exec_s if timeout_s is None else timeout_s
        mark = f"{MARK}={self.remote}.{next(self._count)}.{nonce}"
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        variables = {"HOME": "/root" if user == 0 else "/tmp", "LANG": "C.UTF-8", **self.spec.env, **(env or {})}
        streams = {name: Stream(nonce, output_bytes or limits.output_bytes) for name in ("stdout", "stderr")}
        with self._talking(), self._given(stdin) as given:
            watch = Watch(timeout_s, limits.idle_s if idle_s is None else idle_s, lambda: self._kill(mark))
            try:
                ended = self._follow(
                    ["/bin/sh", "-c", COMMAND, "sh", nonce, given, *argv],
                    variables | dict([mark.split("=", 1)]),
                    cwd or self.spec.workdir, user, streams, watch, timeout_s,
                )  # fmt: skip
            finally:
                watch.close()
        self._check_known()
        (out, out_dropped), (err, err_dropped) = (stream.end() for stream in streams.values())
        reason, code = watch.reason, streams["stdout"].code if streams["stdout"].code is not None else ended
        if reason != "exit":
            code = TIMEOUT_EXIT
        elif code > 128:  # a shell tells of signals like that
            reason = "signal"
        return ExecResult(code, out, err, reason, out_dropped + err_dropped, time.monotonic() - start)

    def _follow(self, argv, variables, cwd, user, streams: dict[str, Stream], watch: Watch, timeout_s: float) -> int:
        """Collect output until both streams are marked, or the process ended without that."""
        for event in self._envd.start(argv, variables, cwd, user, timeout_s + GRACE_S):
            watch.last = time.monotonic()
            for name, data in event.get("data", {}).items():
                if name in streams:
                    streams[name].add(base64.b64decode(data))
            if all(stream.code is not None for stream in streams.values()):
                return 0
            if "end" in event:
                return event["end"].get("exitCode", 0) % 256
        raise httpx.RemoteProtocolError("the stream ended before the command")

    def _kill(self, mark: str) -> None:
        for _ in self._envd.start(["/bin/sh", "-c", KILL, "sh", mark], {}, "/", 0, GRACE_S):
            pass

    @contextmanager
    def _given(self, stdin: bytes):
        if not stdin:
            yield "/dev/null"
            return
        path = f"/tmp/.stdin-{secrets.token_hex(8)}"
        self._envd.write(path, stdin)
        try:
            yield path
        finally:
            with suppress(SandboxError, OSError, httpx.HTTPError):
                self._envd_run(["/bin/rm", "-f", path])

    def _envd_run(self, argv: Sequence[str]) -> None:
        for _ in self._envd.start(argv, {}, "/", 0, REQUEST_S):
            pass

    def _script(self, script: str, path: str, *arguments: str) -> None:
        done = self.exec(["/bin/sh", "-c", script, "sh", *arguments], cwd="/", idle_s=0, output_bytes=4096)
        if not done.ok:
            code = errno.ETIMEDOUT if done.reason != "exit" else done.exit_code
            raise OSError(code, os.strerror(code), path)

    def read(self, path, *, max_bytes=64 << 20):
        path = os.path.join(self.spec.workdir, path)
        self._script(LOOK, path, path, str(max_bytes))
        with self._talking():
            return self._envd.read(path)

    def write(self, path, data, *, mode=0o644):
        path, new = os.path.join(self.spec.workdir, path), f"/tmp/.new-{secrets.token_hex(8)}"
        with self._talking():
            self._envd.write(new, data)
        self._script(PLACE, path, new, path, f"{mode:o}", secrets.token_hex(8))

    def upload(self, source, target):
        source = Path(source)
        if not source.is_dir():
            return self.write(target, source.read_bytes(), mode=source.stat().st_mode & 0o7777)
        target = os.path.join(self.spec.workdir, target)
        done = self.exec(["sh", "-c", 'mkdir -p "$1" && tar -xf - -C "$1"', "sh", target], stdin=pack(source))
        if not done.ok:
            raise OSError(errno.ENOSPC if b"No space" in done.stderr else errno.EIO, done.text.strip(), target)

    def download(self, source, target, *, max_bytes=1 << 30):
        source, archive = os.path.join(self.spec.workdir, source), f"/tmp/.archive-{secrets.token_hex(8)}"
        if not self.exec(["test", "-d", source]).ok:
            Path(target).write_bytes(self.read(source, max_bytes=max_bytes))
            return
        try:
            if not (done := self.exec(["tar", "-cf", archive, "-C", source, "."])).ok:
                raise OSError(errno.EIO, done.text.strip(), source)
            unpack(io.BytesIO(self.read(archive, max_bytes=max_bytes)), Path(target))
        finally:
            self.exec(["rm", "-f", archive])

    def snapshot(self):
        self._check_known()
        answer = self._backend._ask("POST", f"/sandboxes/{self.remote}/snapshots", {"memory": False})
        if answer.status_code != 201:
            raise SnapshotError(f"{self.id}: {_message(answer)}")
        return Snapshot(answer.json()["snapshotID"], self._backend)

    def rollback(self, snapshot):
        """The service has no such verb: a new microVM from the snapshot takes this one's place."""
        self._check_known()
        remote, envd = self._backend._start(self.id, replace(self.spec, image=snapshot))
        old, self.remote, self._envd = self.remote, remote, envd
        self._backend._end(old)

    def fork(self):
        snapshot = self.snapshot()
        try:
            return self._backend.create(replace(self.spec, image=snapshot))
        finally:
            snapshot.drop()

    def renew(self, lease_s):
        super().renew(lease_s)
        answer = self._backend._ask("POST", f"/sandboxes/{self.remote}/timeout", {"timeout": math.ceil(lease_s)})
        if answer.status_code >= 300:
            raise SandboxError(f"{self.id}: {_message(answer)}")

    def destroy(self):
        self._end("destroyed")

    def _end(self, why: str) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = why
        self._backend._alive.pop(self.id, None)
        self._backend._end(self.remote)


class Hosted(SandboxBackend):
    """`image` of a spec is a template's name. `key`: $E2B_API_KEY without it; `api`, `envd`: where a compatible service is."""

    name = "hosted"
    capabilities = Capabilities(
        isolation="microvm", no_network=True, own_uids=True, syscall_filter=True, snapshot=True, fork=True, digests=False
    )

    def __init__(self, allow=(), key=None, api="https://api.e2b.app", domain="e2b.app", envd="https://49983-{id}.{domain}"):
        allow = PROMISES if allow == "all" else tuple(allow)
        if refused := {promise: reason for promise, reason in MISSING.items() if promise not in allow}:
            raise CannotIsolate(self.name, refused)
        key = key or os.environ.get("E2B_API_KEY")
        if not key:
            raise SandboxError("the hosted backend needs a key of its service ($E2B_API_KEY)")
        self._domain, self._envd, self._key = domain, envd, {"X-API-Key": key}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._api, self._client = api, httpx.Client(timeout=REQUEST_S, limits=limits, trust_env=False)
        self._alive: dict[str, HostedSandbox] = {}
        self._keeper = LeaseKeeper(lambda: list(self._alive.values()), lambda sandbox: sandbox._end("its lease ended"))

    def create(self, spec):
        id = f"hosted-{secrets.token_hex(8)}"
        sandbox = self._alive[id] = HostedSandbox(id, spec, *self._start(id, spec), self)
        return sandbox

    def _start(self, id: str, spec: SandboxSpec) -> tuple[str, Envd]:
        snapshot = isinstance(spec.image, Snapshot)
        if snapshot and spec.image.backend is not self:
            raise SnapshotError(f"{spec.image.id} is no snapshot of this backend")
        request = {
            "templateID": spec.image.id if snapshot else str(spec.image),
            "timeout": math.ceil(spec.lease_s),
            "secure": True,
            "allow_internet_access": False,
            "metadata": {"anyrun": id},
        }
        try:
            answer = self._ask("POST", "/sandboxes", request, timeout_s=spec.start_s)
        except StartTimeout:
            self._abandon(id)
            raise
        if answer.status_code != 201:
            kind = {400: ImageError, 404: ImageError, 429: NoCapacity, 503: NoCapacity, 507: NoCapacity}.get(
                answer.status_code, SandboxError
            )
            raise (SnapshotError if snapshot and kind is ImageError else kind)(f"{spec.image}: {_message(answer)}")
        made = answer.json()
        remote = made["sandboxID"]
        url = self._envd.format(id=remote, domain=made.get("domain") or self._domain)
        return remote, Envd(self._client, url, made.get("envdAccessToken"))

    def _abandon(self, id: str) -> None:
        """A create that was not waited for may yet happen."""

        def look():
            for wait in (0.0, 0.5, 2.0, 8.0):
                time.sleep(wait)
                with suppress(SandboxError, ValueError, RuntimeError):  # RuntimeError: the client is closed
                    for found in self._ask("GET", f"/sandboxes?metadata=anyrun%3D{id}").json():
                        self._end(found["sandboxID"])

        threading.Thread(target=look, daemon=True).start()

    def _end(self, remote: str) -> None:
        with suppress(SandboxError):  # its lease at the service ends it
            self._ask("DELETE", f"/sandboxes/{remote}")

    def _ask(self, method: str, path: str, body: dict | None = None, timeout_s: float = REQUEST_S) -> httpx.Response:
        try:
            return self._client.request(method, self._api + path, json=body, headers=self._key, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise StartTimeout(f"the service did not answer {method} {path} in {timeout_s} s") from error
        except httpx.HTTPError as error:
            raise NoCapacity(f"the service cannot be reached: {error}") from error

    def sandboxes(self):
        return list(self._alive.values())

    def durable(self, snapshot, timeout_s):
        """The service's name of it: it answers when the snapshot is stored. Says nothing of equal files."""
        return snapshot.id

    def drop(self, snapshot):
        with suppress(SandboxError):
            self._ask("DELETE", f"/templates/{snapshot.id}")

    def close(self):
        self._keeper.close()
        for sandbox in self.sandboxes():
            sandbox.destroy()
        self._client.close()


def _message(answer: httpx.Response) -> str:
    with suppress(ValueError, AttributeError):
        return f"{answer.status_code} {answer.json().get('message')}"
    return f"{answer.status_code}"
