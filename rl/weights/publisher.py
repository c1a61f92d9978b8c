"""The learner's side: each step's weights become a version of the store, in the background."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxmoe import delta
from rl.weights import version as v
from rl.weights.store import Store


@dataclass(frozen=True)
class Receipt:
    """What became of `publish`: the version that readers now find.

    version: it; superseded: a later `publish` came before this one was begun, and its version carries these changes too.
    bytes: of its difference (of all of it, where there is no version before); changes: elements that differ from the version
    before; whole: all of it was written too.
    """

    version: int
    superseded: bool = False
    bytes: int = 0
    changes: int = 0
    whole: bool = False


class Publisher:
    """Writes versions of one set of named tensors.

    store: where to. full_every: each such version is also written whole, for those who come late; so is one where the differences
    since the last whole one have grown larger than it. keep: whole versions kept, with the differences since; older ones go.
    orders: of tensors whose bytes are not what their dtype says ("nibbles" of packed 4-bit values, see mxmoe.delta).

    The last version that the store took is the base of the next, so a failed write is made good by the next one. Raises ValueError
    for a store that another publisher left with a version that these tensors do not continue: pass `resume=True` to go on with a
    new whole version after it.
    """

    def __init__(
        self, store: Store, *, full_every: int = 20, keep: int = 2, orders: Mapping[str, str] | None = None, resume: bool = False
    ):
        for name, value in (("full_every", full_every), ("keep", keep)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
        versions = [found for name in store.names() if (found := v.version_of(name)) is not None]
        if versions and not resume:
            raise ValueError(f"store must be empty, got one with version {max(versions)}; resume=True goes on after it")
        store.discard_parts()
        self.store, self.full_every, self.keep, self.orders = store, full_every, keep, dict(orders or {})
        self.version = max(versions, default=None)  # the last one that the store took
        self._base: dict[str, Tensor] | None = None
        self._entries: dict[str, v.Entry] = {}
        self._since_whole, self._delta_bytes, self._whole_bytes = 0, 0, 0  # versions since and of the last whole one; bytes
        self._waiting: tuple[int, dict[str, Tensor], Future] | None = None
        self._spare: list[dict[str, Tensor]] = []
        self._wake, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def publish(self, state: Mapping[str, Tensor], version: int) -> "Future[Receipt]":
        """Copy `state` and return; the rest happens behind. version: larger than all before.

        One version may be under way and one wait; a third takes the place of the one that waits, whose receipt says so. The future
        raises what the store raised; readers then still find the version before, and the next call carries these changes too.
        Raises ValueError for a version that does not grow, or tensors of other names, shapes or dtypes than before.
        """
        copies = self._copied(state)
        future: Future[Receipt] = Future()
        with self._wake:
            if self._closed:
                raise RuntimeError("this publisher is closed")
            newest = self._waiting[0] if self._waiting else self.version
            if newest is not None and version <= newest:
                raise ValueError(f"version must be larger than {newest}, got {version}")
            if self._waiting:
                number, unused, replaced = self._waiting
                self._spare.append(unused)
                replaced.set_result(Receipt(number, superseded=True))
            self._waiting = (version, copies, future)
            self._wake.notify()
        return future

    def close(self) -> None:
        """Wait for what is under way and waits; then take no more."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _copied(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not state:
            raise ValueError("state must have a tensor, got none")
        shapes = {name: (tuple(t.shape), v.dtype_name(t.dtype)) for name, t in state.items()}
        if self._entries and shapes != (before := {name: (e.shape, e.dtype) for name, e in self._entries.items()}):
            changed = sorted(name for name in shapes.keys() | before.keys() if shapes.get(name) != before.get(name))
            raise ValueError(f"state must have the tensors of the version before, got others for {', '.join(changed[:5])}")
        with self._wake:
            buffers = self._spare.pop() if self._spare else None
        buffers = buffers or {name: torch.empty(t.shape, dtype=t.dtype) for name, t in state.items()}
        for name, t in state.items():
            buffers[name].copy_(t.detach())
        return buffers

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if not self._waiting:
                    return
                version, state, future = self._waiting
                self._waiting = None
            try:
                receipt = self._write(version, state)
            except BaseException as error:  # the base stays the version that the store has
                self._spare.append(state)
                future.set_exception(error)
            else:
                future.set_result(receipt)

    def _write(self, version: int, state: dict[str, Tensor]) -> Receipt:
        directory, entries = v.directory(version), v.entries(state, self.orders)
        late = self._since_whole >= self.full_every or self._delta_bytes > self._whole_bytes
        files: dict[str, v.File | None] = {"delta": None, "whole": None}
        if self._base is not None:
            moved = [name for name, entry in entries.items() if entry.hash != self._entries[name].hash]
            deltas = {name: delta.diff(self._base[name], state[name], entries[name].order) for name in moved}
            entries |= {name: replace(entries[name], changes=found.num_changes) for name, found in deltas.items()}
            files["delta"] = self._write_file(f"{directory}/delta.safetensors", v.pack_delta(deltas))
        if self._base is None or late:
            files["whole"] = self._write_file(f"{directory}/whole.safetensors", v.pack_whole(state))
        manifest = v.Manifest(version, self.version if files["delta"] else None, entries, **files)
        self.store.write(f"{directory}/manifest.json", manifest.to_json())
        if self._base is not None:
            self._spare.append(self._base)
        self._base, self._entries, self.version = state, entries, version
        if files["whole"]:
            self._since_whole, self._delta_bytes, self._whole_bytes = 1, 0, files["whole"].bytes
            self._prune()
        else:
            self._since_whole, self._delta_bytes = self._since_whole + 1, self._delta_bytes + files["delta"].bytes
        size = (files["delta"] or files["whole"]).bytes
        return Receipt(version, bytes=size, changes=sum(entry.changes for entry in entries.values()), whole=bool(files["whole"]))

    def _write_file(self, name: str, data: bytes) -> v.File:
        self.store.write(name, data)
        return v.File.of(data)

    def _prune(self) -> None:
        """Delete what is older than the `keep` newest whole versions: manifests first, so that no reader finds half of one."""
        names = self.store.names()
        whole = sorted(name for name in names if name.endswith("/whole.safetensors"))[-self.keep :]
        old = [name for name in names if name < whole[0].partition("/")[0]]
        for name in sorted(old, key=lambda name: not name.endswith("/manifest.json")):
            self.store.delete(name)
