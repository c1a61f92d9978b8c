"""One owner of every sample's state: what is admitted, what is trained, and that nothing is lost, trained twice or too old.

Samples come in groups (one prompt, several tries). Step n of the learner trains `groups_per_step` of them on weights of version n.
No token of a sample may be older than `max_staleness` versions when it is trained: a group admitted at version v has to be trained
by step v + max_staleness, its deadline. Nothing finished is thrown away to keep that; instead

- a group is admitted only while all groups under way can still be trained by their deadlines, oldest first: at step n, with the
  samplers at version v, at most groups_per_step * (v + max_staleness - n + 1) of them;
- a step takes the oldest groups that have finished, but waits for older ones while without them too few steps would be left for
  those that remain: of deadline d or before, at most groups_per_step * (d - n).

max_staleness=0 is the synchronous mode of the same path. A sample that fails is tried again, as part of the same group.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum


class State(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    VERIFYING = "verifying"
    READY = "ready"
    TRAINING = "training"
    DONE = "done"
    FAILED = "failed"  # tried as often as allowed: counts as finished, and is of no part in the baseline


_NEXT = {
    State.QUEUED: {State.RUNNING},
    State.RUNNING: {State.VERIFYING, State.QUEUED, State.FAILED},
    State.VERIFYING: {State.READY, State.QUEUED, State.FAILED},
    State.READY: {State.TRAINING},
    State.TRAINING: {State.DONE, State.READY},  # READY again: the learner died before it took the step
    State.DONE: set(),
    State.FAILED: set(),
}


@dataclass
class Sample:
    """One try at a prompt. attempt: how often it has been started; payload: where what it made is kept (a reference)."""

    id: int
    group: int
    state: State = State.QUEUED
    attempt: int = 0
    worker: str = ""
    payload: str = ""
    error: str = ""


@dataclass
class Group:
    """The tries at one prompt. version: of the weights at admission, the oldest that a token of it can have."""

    id: int
    prompt: str
    version: int
    samples: list[int] = field(default_factory=list)


class StateError(RuntimeError):
    """A transition that a sample's state does not allow."""


class Reconciler:
    """Bookkeeping only, in one thread; those who do the work call it.

    group_size: samples of a group. groups_per_step: groups of a step. max_staleness: in versions. attempts: starts of a sample
    until it has failed. on_transition: called as (sample, old state) after each. Raises ValueError for sizes below 1.
    """

    def __init__(
        self,
        *,
        group_size: int,
        groups_per_step: int,
        max_staleness: int,
        attempts: int = 3,
        on_transition: Callable[[Sample, State], None] | None = None,
    ):
        for name, value, least in (
            ("group_size", group_size, 1),
            ("groups_per_step", groups_per_step, 1),
            ("max_staleness", max_staleness, 0),
            ("attempts", attempts, 1),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number from {least}, got {value!r}")
        self.group_size, self.groups_per_step, self.max_staleness, self.attempts = (
            group_size,
            groups_per_step,
            max_staleness,
            attempts,
        )
        self.on_transition = on_transition
        self.step = 0  # the next to be trained
        self.version = 0  # of the weights that samplers have
        self.samples: dict[int, Sample] = {}
        self.groups: dict[int, Group] = {}  # admitted and not done, the oldest first
        self.counts = Counter({state: 0 for state in State})  # of all samples ever, by state
        self.prompts: set[str] = set()  # each is trained on once
        self._next_group = self._next_sample = 0
        self._unfinished: dict[int, int] = {}  # group -> samples neither ready nor failed
        self._queue: dict[int, None] = {}  # samples to start, the oldest first

    # Admission

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        reach = self.version + self.max_staleness - self.step + 1
        return max(0, self.groups_per_step * reach - len(self.groups))

    def admit(self, prompt: str) -> Group:
        """A new group, its samples queued. Raises StateError beyond the capacity or for a prompt that was admitted before."""
        if self.capacity < 1:
            raise StateError(
                f"no group can be admitted at step {self.step}, version {self.version}, with {len(self.groups)} under way"
            )
        if prompt in self.prompts:
            raise StateError(f"prompt {prompt!r} was admitted before, and each is trained on once")
        group = Group(self._next_group, prompt, self.version)
        self._next_group += 1
        self.prompts.add(prompt)
        for _ in range(self.group_size):
            sample = Sample(self._next_sample, group.id)
            self._next_sample += 1
            self.samples[sample.id] = sample
            group.samples.append(sample.id)
            self._queue[sample.id] = None
            self.counts[State.QUEUED] += 1
        self.groups[group.id] = group
        self._unfinished[group.id] = self.group_size
        return group

    def set_version(self, version: int) -> None:
        """The weights that every sampler has, at least. Raises StateError for one that is older, or that no step has made."""
        if not self.version <= version <= self.step:
            raise StateError(f"version must be from {self.version} to {self.step}, got {version}")
        self.version = version

    # Samples

    def start(self, worker: str) -> Sample | None:
        """The oldest queued sample, now running at `worker`; None: there is none."""
        if not self._queue:
            return None
        sample = self.samples[next(iter(self._queue))]
        sample.attempt += 1
        self._move(sample, State.RUNNING, worker=worker, error="")
        return sample

    def generated(self, sample: int) -> None:
        """It has ended and is being verified."""
        self._move(self._sample(sample), State.VERIFYING)

    def verified(self, sample: int, payload: str = "") -> None:
        """It is ready to be trained on; `payload` says where it is kept."""
        self._move(self._sample(sample), State.READY, payload=payload)

    def failed(self, sample: int, error: str, *, counts: bool = True) -> State:
        """Through no fault of the policy's: queued again, before all younger ones, or failed for good. counts: as an attempt; not
        where the sample cannot be the cause."""
        found = self._sample(sample)
        found.attempt -= not counts
        state = State.QUEUED if found.attempt < self.attempts else State.FAILED
        self._move(found, state, error=error, worker="")
        return state

    def lost(self, worker: str) -> list[int]:
        """A worker has died: what it had under way is queued again (or failed). Returns those samples."""
        own = [s.id for s in self.samples.values() if s.worker == worker and s.state in (State.RUNNING, State.VERIFYING)]
        for sample in own:
            self.failed(sample, f"lost with {worker}")
        return own

    # Steps

    def next_batch(self) -> list[Group] | None:
        """The groups of step `self.step`, now training; None: too few have finished, or one that cannot wait has not."""
        finished = [group for group in self.groups.values() if not self._unfinished[group.id]]
        if len(finished) < self.groups_per_step:
            return None
        batch = finished[: self.groups_per_step]
        taken = {group.id for group in batch}
        left = (group for group in self.groups.values() if group.id not in taken)  # in the order of their deadlines
        if any(i > self.groups_per_step * (group.version + self.max_staleness - self.step) for i, group in enumerate(left, 1)):
            return None
        for group in batch:
            for sample in group.samples:
                if self.samples[sample].state is State.READY:
                    self._move(self.samples[sample], State.TRAINING)
        return batch

    def trained(self, batch: Iterable[Group]) -> int:
        """The step has been taken and is durable; returns the version that it made."""
        batch = list(batch)
        if oldest := [group.id for group in batch if group.version < self.step - self.max_staleness]:
            raise StateError(f"groups {oldest} are older than {self.max_staleness} versions at step {self.step}")
        for group in batch:
            for sample in group.samples:
                if self.samples[sample].state is not State.FAILED:
                    self._move(self.samples[sample], State.DONE)
                del self.samples[sample]
            del self.groups[group.id], self._unfinished[group.id]
        self.step += 1
        return self.step

    def not_trained(self, batch: Iterable[Group]) -> None:
        """The learner died before the step was durable: its groups are ready as before."""
        for group in batch:
            for sample in group.samples:
                if self.samples[sample].state is State.TRAINING:
                    self._move(self.samples[sample], State.READY)

    # State

    def _sample(self, sample: int) -> Sample:
        if sample not in self.samples:
            raise StateError(f"no sample {sample} is under way")
        return self.samples[sample]

    def _move(self, sample: Sample, state: State, **changes: str) -> None:
        old = sample.state
        if state not in _NEXT[old]:
            raise StateError(f"sample {sample.id} cannot go from {old} to {state}")
        sample.state = state
        for name, value in changes.items():
            setattr(sample, name, value)
        self.counts[old] -= 1
        self.counts[state] += 1
        if state is State.QUEUED:
            self._queue = dict.fromkeys(sorted([*self._queue, sample.id]))
        elif old is State.QUEUED:
            del self._queue[sample.id]
        finished = {State.READY, State.FAILED}
        if state in finished and old is not State.TRAINING:
            self._unfinished[sample.group] -= 1
        if self.on_transition:
            self.on_transition(sample, old)

    def to_json(self) -> str:
        """All of it, to go on from; see `from_json`."""
        sizes = ("group_size", "groups_per_step", "max_staleness", "attempts", "step", "version", "_next_group", "_next_sample")
        return json.dumps(
            {name: getattr(self, name) for name in sizes}
            | {"groups": [asdict(group) for group in self.groups.values()], "samples": [asdict(s) for s in self.samples.values()]}
            | {"prompts": sorted(self.prompts), "counts": dict(self.counts)}
        )

    @classmethod
    def from_json(cls, text: str, on_transition: Callable[[Sample, State], None] | None = None) -> "Reconciler":
        """As saved; what was running or verifying has died with the process and is queued again, what was training is ready."""
        saved = json.loads(text)
        own = cls(**{name: saved[name] for name in ("group_size", "groups_per_step", "max_staleness", "attempts")})
        own.step, own.version = saved["step"], saved["version"]
        own._next_group, own._next_sample = saved["_next_group"], saved["_next_sample"]
        own.prompts, own.counts = set(saved["prompts"]), Counter({State(state): n for state, n in saved["counts"].items()})
        own.groups = {group["id"]: Group(**group) for group in saved["groups"]}
        own.samples = {s["id"]: Sample(**{**s, "state": State(s["state"])}) for s in saved["samples"]}
        finished = {State.READY, State.TRAINING, State.FAILED}
        own._unfinished = {g.id: sum(own.samples[s].state not in finished for s in g.samples) for g in own.groups.values()}
        own._queue = dict.fromkeys(s.id for s in own.samples.values() if s.state is State.QUEUED)
        for sample in own.samples.values():
            if sample.state in (State.RUNNING, State.VERIFYING):
                sample.attempt -= 1  # no fault of its own
                own._move(sample, State.QUEUED, worker="")
            elif sample.state is State.TRAINING:
                own._move(sample, State.READY)
        own.on_transition = on_transition
        return own
