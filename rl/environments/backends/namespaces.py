"""The default: Linux namespaces, as root, by the launcher in csrc/sandbox.

A sandbox is an overlay of a tmpfs of its own (bytes and inodes limited) on a shared image, with its own users, processes, mounts,
network (loopback only), IPC, host name and cgroups; capabilities like a container's, a system call filter, no /sys, a masked /proc.
The kernel is shared: that is the boundary. docs/environments.md says what is promised and what is not.

Snapshots stack: the files written so far become one more read-only layer and writing goes on in a new one, so that neither the
snapshot nor a fork copies anything. While something runs in the sandbox its files are copied instead, with its processes frozen.
"""

import errno
import itertools
import shutil
import socket
import subprocess
import threading
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rl.environments.freezer import frozen
from rl.environments.layers import LayerStore
from rl.environments.leases import LeaseKeeper
from rl.environments.manifest import digest_of_stack, manifest, manifest_digest
from rl.environments.node import SLOTS, Node
from rl.environments.sandbox import (
    PROMISES,
    CannotIsolate,
    Capabilities,
    ImageError,
    NoCapacity,
    SandboxBackend,
    SandboxError,
    SandboxLost,
    SandboxSpec,
    Snapshot,
    SnapshotError,
    StartTimeout,
)
from rl.environments.served import Refused, ServedSandbox, ask, pair, strings

FULL = {errno.ENOSPC, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EUSERS}
MAX_LAYERS = 60  # of a stack; then a snapshot copies them into one


@dataclass(frozen=True)
class Stack:
    """What a sandbox stands on: read-only layers, the uppermost first, and the image below them."""

    image: Path
    layers: tuple[str, ...] = ()


@dataclass
class Kept:
    """A snapshot's stack, and its digest once that is known."""

    stack: Stack
    digest: Future = field(default_factory=Future)


class NamespaceSandbox(ServedSandbox):
    def __init__(self, id, spec, control, backend: "Namespaces", slot: int, stack: Stack, layer: str):
        super().__init__(id, spec, control)
        self._backend, self.slot, self._stack, self._layer = backend, slot, stack, layer
        self._oom_kills = 0
        self._changing = threading.Lock()  # one snapshot or rollback at a time

    @property
    def host_pid(self):
        self.check()
        pid = int(self._backend.node.ask("pid", str(self.slot))[1])
        if not pid:
            self._end("its first process ended")
            self.check()
        return pid

    def _free(self, why):
        self._backend._free(self)

    def _was_oom(self):
        with suppress(OSError):
            before, self._oom_kills = self._oom_kills, self._backend.node.cgroups.oom_kills(str(self.slot))
            return self._oom_kills > before
        return False

    def snapshot(self):
        return self._snapshot(durable=True)

    def _snapshot(self, durable: bool) -> Snapshot:
        self.check()
        with self._changing:
            stack = self._stack_up() or self._copy()
        return self._backend._keep(stack, durable)

    def fork(self):
        snapshot = self._snapshot(durable=False)
        try:
            return self._backend.create(replace(self.spec, image=snapshot))
        finally:
            snapshot.drop()

    def rollback(self, snapshot):
        stack = self._backend._kept(snapshot).stack
        self.check()
        with self._changing:
            self._replace(stack, kill=True)

    def _stack_up(self) -> Stack | None:
        """The fast way: the layer becomes read-only under a new one. None if something runs."""
        if len(self._stack.layers) >= MAX_LAYERS:
            return None
        return self._replace(Stack(self._stack.image, (self._layer, *self._stack.layers)), kill=False)

    def _replace(self, stack: Stack, kill: bool) -> Stack | None:
        with self._gate:
            if self._running and not kill:
                return None
            self._closed = True
        try:
            others = int(ask(self._control, ["kill" if kill else "processes"], timeout_s=30)[1])
            if others:
                return None
            layer, backend = self._backend._new_layer(), self._backend
            backend._hold(stack)
            request = backend._layer_fields(layer, self.spec, stack)
            try:
                backend.node.ask("replace", str(self.slot), "1" if kill else "0", *request)
            except SandboxError:
                backend._release(stack)
                raise
            old, old_layer = self._stack, self._layer
            self._stack, self._layer = stack, layer
            if old_layer not in stack.layers:
                backend._drop_layer(old_layer)
            backend._release(old)
            return stack
        finally:
            with self._gate:
                self._closed = False
                self._gate.notify_all()

    def _copy(self) -> Stack:
        """The slow way, of a sandbox in which something runs (or of too high a stack, whose layers it joins)."""
        backend = self._backend
        name = backend._new_layer()
        limits = self.spec.limits
        backend.node.ask("layer", name, str(limits.disk_bytes), str(limits.inodes))
        try:
            with frozen(backend.node.cgroups, str(self.slot)):
                source, target = backend.node.files(self._layer), backend.node.files(name)
                done = subprocess.run(["cp", "-a", f"{source}/.", str(target)], capture_output=True, text=True)
            if done.returncode:
                raise SnapshotError(f"copying the files failed: {done.stderr.strip()[-300:]}")
        except BaseException:
            backend._drop_layer(name)
            raise
        return Stack(self._stack.image, (name, *self._stack.layers))


class Namespaces(SandboxBackend):
    """`allow`: promises that this machine may break (PROMISES), or "all". `store`: directory in which snapshots become durable;
    without one they are hashed, and live as long as the backend. `images`: directory of images that specs give by name."""

    name = "namespaces"

    def __init__(self, allow=(), store: Path | None = None, images: Path | None = None, directory: Path | None = None):
        allow = PROMISES if allow == "all" else tuple(allow)
        self.node = Node(directory)
        missing = self.node.cgroups.missing()
        self.capabilities = Capabilities(
            isolation="namespaces",
            snapshot=True,
            fork=True,
            egress=True,
            **{promise: promise not in missing for promise in PROMISES},
        )
        self._images, self._store = images, LayerStore(store) if store else None
        self._free_slots, self._names, self._lock = deque(range(SLOTS)), itertools.count(), threading.Lock()
        self._alive: dict[int, NamespaceSandbox] = {}
        self._references: Counter[str] = Counter()  # of layers that are read-only
        self._snapshots: dict[str, Kept] = {}
        self._layer_digests: dict[str, Future] = {}
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="manifest")
        self._keeper = LeaseKeeper(lambda: list(self._alive.values()), lambda sandbox: sandbox._end("its lease ended"))
        if refused := {promise: reason for promise, reason in missing.items() if promise not in allow}:
            self.close()
            raise CannotIsolate(self.name, refused)

    def alive(self):
        return self.node.alive()

    def create(self, spec):
        stack = self._stack_of(spec.image)
        with self._lock:
            if not self._free_slots:
                raise NoCapacity(f"all {SLOTS} slots of the node are taken")
            slot = self._free_slots.popleft()  # the one free for longest
        layer, name = self._new_layer(), str(slot)
        ours, theirs = pair()
        self._hold(stack)
        try:
            with theirs:
                request = ["create", name, str(self.node.uid(slot)), *self._layer_fields(layer, spec, stack)]
                request.insert(6, "sandbox")
                self._send(request + self.node.cgroups.fields(name, spec.limits), theirs)
            ours.settimeout(spec.start_s)
            strings(ours.recv(4096))
        except BaseException as error:
            ours.close()
            self._free_slot(slot)
            self._release(stack)
            raise self._start_error(error, spec) from error
        ours.settimeout(None)
        sandbox = NamespaceSandbox(f"{self.node.name}.{layer}", spec, ours, self, slot, stack, layer)
        self._alive[slot] = sandbox
        return sandbox

    def _send(self, request: list[str], control) -> None:
        message = "\0".join(request) + "\0"
        try:
            socket.send_fds(self.node.socket, [message.encode()], [control.fileno()])
        except OSError as error:
            raise SandboxLost(f"the node {self.node.name} is gone") from error

    def _start_error(self, error: BaseException, spec: SandboxSpec) -> BaseException:
        if isinstance(error, TimeoutError):
            return StartTimeout(f"not started after {spec.start_s} s")
        if isinstance(error, Refused):
            if error.step == "image":
                return ImageError(f"{spec.image}: {error}")
            if error.errno in FULL:
                return NoCapacity(str(error))
            if error.errno in (errno.EPERM, errno.EACCES):
                return CannotIsolate(self.name, {promise: str(error) for promise in ("own_uids", "no_network", "syscall_filter")})
        if isinstance(error, OSError) and not isinstance(error, TimeoutError) and not self.node.alive():
            return SandboxLost(f"the node {self.node.name} is gone")  # and with it the layers that were looked at
        if isinstance(error, SandboxLost) and self.node.alive():
            return NoCapacity("it ended while it started: too little memory or too few processes for it")
        return error

    def _layer_fields(self, layer: str, spec: SandboxSpec, stack: Stack) -> list[str]:
        """layer, bytes, inodes, lowers: what is written already counts."""
        used = sum(shutil.disk_usage(self.node.files(name)).used for name in stack.layers)
        lowers = [f"l:{self.node.layers}/{name}/u" for name in stack.layers] + [f"l:{stack.image}"]
        size = max(1 << 16, spec.limits.disk_bytes - used)
        return [layer, str(size), str(spec.limits.inodes), *lowers]

    def _stack_of(self, image) -> Stack:
        if isinstance(image, Snapshot):
            return self._kept(image).stack
        path = Path(image)
        if not path.is_absolute() and self._images is not None:
            path = self._images / path / "rootfs"
        if not image or not path.is_dir():
            raise ImageError(f"there is no image {str(image)!r}")
        return Stack(path.resolve())

    def _new_layer(self) -> str:
        return str(next(self._names))

    def _hold(self, stack: Stack) -> None:
        with self._lock:
            self._references.update(stack.layers)

    def _release(self, stack: Stack) -> None:
        with self._lock:
            self._references.subtract(stack.layers)
            unused = [layer for layer in stack.layers if self._references[layer] <= 0]
            for layer in unused:
                del self._references[layer]
                self._layer_digests.pop(layer, None)
        for layer in unused:
            self._drop_layer(layer)

    def _drop_layer(self, layer: str) -> None:
        with suppress(SandboxLost):
            self.node.ask("drop", layer)

    def _free(self, sandbox: NamespaceSandbox) -> None:
        self._alive.pop(sandbox.slot, None)
        sandbox._control.close()
        self._free_slot(sandbox.slot)
        self._release(sandbox._stack)

    def _free_slot(self, slot: int) -> None:
        with suppress(SandboxLost):
            self.node.ask("destroy", str(slot), "0")
        with self._lock:
            self._free_slots.append(slot)

    def sandboxes(self):
        return list(self._alive.values())

    def _keep(self, stack: Stack, durable: bool = True) -> Snapshot:
        self._hold(stack)
        kept = Kept(stack)
        id = f"{self.node.name}.s{next(self._names)}"
        self._snapshots[id] = kept
        if durable:
            self._hasher.submit(self._make_durable, kept)
        return Snapshot(id, self)

    def _make_durable(self, kept: Kept) -> None:
        try:
            kept.digest.set_result(self._store_stack(kept.stack))
        except Exception as error:  # whoever asks whether it is durable is told
            kept.digest.set_exception(SnapshotError(f"not stored: {error}"))

    def _store_stack(self, stack: Stack) -> str:
        digests = []
        for layer in stack.layers:
            if layer not in self._layer_digests:
                files = self.node.files(layer)
                digest = self._store.add(files) if self._store else manifest_digest(manifest(files))
                self._layer_digests[layer] = digest
            digests.append(self._layer_digests[layer])
        digest = digest_of_stack(str(stack.image), digests)
        if self._store:
            self._store.add_stack(digest, str(stack.image), digests)
        return digest

    def _kept(self, snapshot: Snapshot) -> Kept:
        kept = self._snapshots.get(snapshot.id)
        if snapshot.backend is not self or kept is None:
            raise SnapshotError(f"{snapshot.id} is no snapshot of this backend, or was dropped")
        return kept

    def durable(self, snapshot, timeout_s):
        try:
            return self._kept(snapshot).digest.result(timeout_s)
        except FutureTimeout as error:
            raise SnapshotError(f"{snapshot.id} is not durable after {timeout_s} s") from error

    def restore(self, digest: str) -> Snapshot:
        """A durable snapshot from the store, also one of another backend's life; every byte is checked against its manifest."""
        if self._store is None:
            raise SnapshotError("the backend was opened without a store")
        image, digests = self._store.stack(digest)
        layers = []
        try:
            for layer_digest in digests:
                name = self._new_layer()
                self.node.ask("layer", name, str(self._store.size(layer_digest)), "1000000")
                layers.append(name)
                self._store.extract(layer_digest, self.node.files(name))
                self._layer_digests[name] = layer_digest
        except BaseException:
            for name in layers:
                self._drop_layer(name)
            raise
        return self._keep(Stack(Path(image), tuple(layers)))

    def drop(self, snapshot):
        kept = self._snapshots.pop(snapshot.id, None)
        if kept:
            self._release(kept.stack)

    def close(self):
        self._keeper.close()
        for sandbox in self.sandboxes():
            sandbox.destroy()
        self._hasher.shutdown(cancel_futures=True)
        self.node.close()
