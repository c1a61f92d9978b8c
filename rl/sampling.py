"""Sampling as a service: an actor that never stops stepping, and its client, which many conversations share.

The actor owns a `Sampler` and keeps its weights at the newest version of the store: a thread reads and checks what is new while
sampling goes on, then the weights change between two steps. The client has one call under way at a time, which brings new requests
and takes back what has ended, so that its cost does not grow with the number of conversations.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass

import torch

from rl.actors import ActorDied, Handle
from rl.harness.model import ModelError
from rl.sampler import Answer, Request, Sampler
from rl.weights import Receiver, Store, VersionError
from training.base import find_base, read_model

POLL_S = 0.02  # between two looks at the store
WAIT_S = 0.05  # the longest that `exchange` waits for an answer


@dataclass(frozen=True)
class Status:
    """Of a sampler, since its start. pause_s: the longest that sampling stood still for new weights; fetch_s: of the last fetch."""

    version: int
    active: int
    new_tokens: int
    read_tokens: int
    copied_tokens: int
    pause_s: float
    fetch_s: float
    updates: int
    error: str = ""


class SamplerActor:
    """A sampler of the model at `base` that follows the store at `weights`, stepping on a thread of its own.

    changes: fields of the model's config (recipe, deterministic). at_least: the version to wait for, up to `patience_s`, before
    anything is sampled. The other arguments are those of `Sampler`.
    """

    def __init__(
        self,
        base: str,
        weights: str,
        *,
        num_slots: int,
        capacity: int,
        prefill_tokens: int = 2048,
        recompute: bool = False,
        threads: int = 1,
        changes: dict | None = None,
        at_least: int = 0,
        patience_s: float = 60.0,
    ):
        torch.set_num_threads(threads)
        model = read_model(find_base(base), **(changes or {}))
        self.sampler = Sampler(model, num_slots=num_slots, capacity=capacity, prefill_tokens=prefill_tokens, recompute=recompute)
        self.receiver = Receiver(Store(weights), {name: p.data for name, p in model.named_parameters()})
        self._lock, self._changed = threading.Lock(), threading.Condition()
        self._inbox: list[Request] = []
        self._aborts: list[Hashable] = []
        self._ended: list[Answer] = []
        self._update, self._error = None, ""
        self._applied = threading.Event()  # nothing fetched waits
        self._applied.set()
        self._pause_s = self._fetch_s = 0.0
        self._updates = 0
        self._closed = False
        deadline = time.monotonic() + patience_s
        while self.receiver.version is None or self.sampler.version < at_least:
            self._apply(self._fetched())
            if time.monotonic() > deadline:
                raise RuntimeError(f"version {at_least} is not in {weights} after {patience_s:.0f} s")
            time.sleep(POLL_S)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._step, self._follow)]
        for thread in self._threads:
            thread.start()

    def pid(self) -> int:
        return os.getpid()

    def exchange(self, requests: Sequence[Request], aborts: Sequence[Hashable] = ()) -> tuple[list[Answer], Status]:
        """Take requests in, give up others, and return what has ended: at once where there is something, else after a moment."""
        with self._changed:
            self._inbox += requests
            self._aborts += aborts
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._error or self._closed, WAIT_S)
            ended, self._ended = self._ended, []
        if self._error and not ended:
            raise RuntimeError(self._error)
        return ended, self.status()

    def status(self) -> Status:
        s = self.sampler
        counts = s.new_tokens, s.read_tokens, s.copied_tokens
        return Status(s.version, s.active, *counts, self._pause_s, self._fetch_s, self._updates, self._error)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(5)

    def _step(self) -> None:
        """The stepping thread: mailbox, weights, one forward pass, again."""
        try:
            while not self._closed:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._inbox or self._aborts or self._update or self._closed or self.sampler.active, 0.5
                    )
                    inbox, self._inbox = self._inbox, []
                    aborts, self._aborts = self._aborts, []
                    update, self._update = self._update, None
                for request in inbox:
                    self._submit(request)
                for name in aborts:
                    with contextlib.suppress(KeyError):  # ended meanwhile
                        self.sampler.abort(name)
                if update is not None:
                    self._apply(update)
                    self._applied.set()
                if ended := self.sampler.step():
                    with self._changed:
                        self._ended += ended
                        self._changed.notify_all()
        except BaseException as error:  # told to whoever asks next
            with self._changed:
                self._error = f"{type(error).__name__}: {error}"
                self._changed.notify_all()

    def _submit(self, request: Request) -> None:
        try:
            self.sampler.submit(request)
        except ValueError as error:  # the fault of this one only
            with self._changed:
                self._ended.append(Answer(request, end=f"refused: {error}"))

    def _follow(self) -> None:
        """The fetching thread."""
        while not self._closed:
            if self._applied.is_set() and (update := self._fetched()) is not None:
                self._applied.clear()
                with self._changed:
                    self._update = update
                    self._changed.notify_all()
            time.sleep(POLL_S)

    def _fetched(self):
        """An update; None where there is none, or none that can be read: the store may be away for a while."""
        start = time.monotonic()
        try:
            newest = self.receiver.newest()
            if newest is None or (self.receiver.version is not None and newest <= self.sampler.version):
                return None  # also where the learner has gone back and will come to this version again
            update = self.receiver.fetch(newest)
        except VersionError:
            self.receiver.version = None  # from a whole version, once there is one
            return None
        except OSError:
            return None
        self._fetch_s = time.monotonic() - start
        return update

    def _apply(self, update) -> None:
        if update is None:
            return
        start = time.monotonic()
        try:
            self.sampler.update(lambda: self.receiver.apply(update), update.version)
        except VersionError:  # all is as it was; the next fetch takes another way
            self.receiver.version = None
        self._pause_s, self._updates = max(self._pause_s, time.monotonic() - start), self._updates + 1


class SamplerClient:
    """Answers of one sampler to many threads. A sampler that dies is started again, and asked again what it had not answered.

    `start` makes the actor; `capacity`: tokens of a request and its answer together.
    """

    def __init__(self, start: Callable[[], Handle], capacity: int):
        self._start, self.capacity = start, capacity
        self.handle = start()
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._pending: dict[Hashable, tuple[Request, Future]] = {}
        self._new: list[Request] = []
        self._aborts: list[Hashable] = []
        self._closed = False
        self.restarts = 0
        self.error = ""
        self.status: Status = self.handle.ask("status")
        self._thread = threading.Thread(target=self._run, name="sampler-client", daemon=True)
        self._thread.start()

    def answer(self, request: Request, deadline: float) -> Answer | None:
        """Blocks; None where it is not there at the deadline (of time.monotonic). ModelError: the sampler refused it or is gone."""
        future: Future = Future()
        with self._lock:
            if self._closed or self.error:
                raise ModelError(self.error or "the sampler is closed")
            self._pending[request.id] = request, future
            self._new.append(request)
        self._wake.set()
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except CancelledError:
            raise ModelError("the sampler was closed") from None
        except NotInTime:
            with self._lock:
                if self._pending.pop(request.id, None) is not None:
                    self._aborts.append(request.id)
            return None

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(10)
        self.handle.end()

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                requests, self._new = self._new, []
                aborts, self._aborts = self._aborts, []
                idle = not self._pending and not requests and not aborts
            if idle:
                self._wake.wait(POLL_S)  # then a look at the sampler's version all the same
                self._wake.clear()
            try:
                answers, self.status = self.handle.ask("exchange", requests, aborts)
            except ActorDied:
                if self._closed:
                    break
                self._restart()
                continue
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")
                break
            with self._lock:
                found = [(self._pending.pop(answer.request.id, None), answer) for answer in answers]
            for waiting, answer in found:
                if waiting is None or answer.end == "aborted":
                    continue
                if answer.end.startswith("refused"):
                    waiting[1].set_exception(ModelError(answer.end))
                else:
                    waiting[1].set_result(answer)
        with self._lock:
            left, self._pending = self._pending, {}
        for _, future in left.values():
            future.cancel()

    def _restart(self) -> None:
        self.restarts += 1
        try:
            self.handle = self._start()
            self.status = self.handle.ask("status")
        except ActorDied:
            return  # again, by the next round
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            self._closed = True
            return
        with self._lock:
            self._new, self._aborts = [request for request, _ in self._pending.values()], []

    def _fail(self, error: str) -> None:
        with self._lock:
            self.error = error
            left, self._pending = self._pending, {}
        for _, future in left.values():
            future.set_exception(ModelError(error))
