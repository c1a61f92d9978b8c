"""The built-in sampler: many requests at once over `training.model`, tokens in, tokens out.

Every `step` runs one forward pass over what is due: one token of each answer under way, and, within a budget, prompts. The latent
cache of a prompt that is the beginning of another (a group's, a conversation's next turn) is copied, not computed. Of each answer's
token it records the log-probability at the temperature used, the version of the weights that chose it, and of every token that was
read, answer or prompt, the experts that each MoE layer chose. Weights change between steps: answers under way go on.

A token is a function of the weights, the tokens before it and the key (seed, sample, position), not of what else is sampled.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from training.model import KVCache, Model

NO_EXPERT = -1


@dataclass(frozen=True)
class Request:
    """A prompt to be answered.

    id: any name, unique among those under way. prompt: token ids. max_new: tokens at most. stop: ids that end it, of which the one
    found belongs to the answer. temperature: 0 takes the likeliest token. seed, sample: what the choices are keyed by.
    session: requests of one session may go on from each other's cache whatever weights have filled it; None: on its own.
    """

    id: Hashable
    prompt: tuple[int, ...]
    max_new: int
    stop: frozenset[int] = frozenset()
    temperature: float = 1.0
    seed: int = 0
    sample: int = 0
    session: Hashable = None


@dataclass
class Answer:
    """What a request has so far. Lists go token by token, `experts` over prompt and answer.

    experts: (tokens, MoE layers, K) int16; a last token that was never read has NO_EXPERT. end: "stop", "length" or "aborted".
    """

    request: Request
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: np.ndarray | None = None
    end: str = ""


@dataclass
class _Slot:
    """A row of the cache: the tokens it holds, what they chose, and the versions that filled it."""

    row: int
    tokens: list[int]
    experts: list[np.ndarray]
    oldest: int
    session: Hashable
    answer: Answer | None  # None: kept for others to start from
    used: int = 0


class Sampler:
    """Answers requests with a model of this project.

    num_slots: answers under way and prompts kept, each of at most `capacity` tokens. prefill_tokens: prompt tokens of a step.
    recompute: on new weights, read again all that answers under way hold; else their cache stays, of mixed versions, and only
    requests of the same session start from it. Raises ValueError for a request that cannot fit.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_slots: int,
        capacity: int,
        prefill_tokens: int = 2048,
        recompute: bool = False,
        version: int = 0,
    ):
        if prefill_tokens < 1:
            raise ValueError(f"prefill_tokens must be at least 1, got {prefill_tokens}")
        self.model, self.version, self.recompute, self.prefill_tokens = model.eval(), version, recompute, prefill_tokens
        self.cache = KVCache(model.config, num_slots, capacity)
        self.waiting: deque[Answer] = deque()
        self._slots: list[_Slot] = []
        self._ids: set[Hashable] = set()
        self._clock = 0
        self.read_tokens = self.copied_tokens = self.new_tokens = 0  # since the start

    @property
    def active(self) -> int:
        """Requests that wait or are under way."""
        return len(self.waiting) + sum(slot.answer is not None for slot in self._slots)

    def submit(self, request: Request, so_far: Answer | None = None) -> None:
        """Take a request; `so_far`: an aborted answer to go on from, of which no token is sampled again."""
        total = len(request.prompt) + request.max_new
        if not request.prompt or request.max_new < 1 or total > self.cache.capacity:
            raise ValueError(
                f"prompt and max_new must be at least a token each and {self.cache.capacity} together, "
                f"got {len(request.prompt)} and {request.max_new}"
            )
        vocabulary = self.model.config.vocab_size
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise ValueError(f"prompt must hold ids from 0 to {vocabulary - 1}, got {min(request.prompt)} to {max(request.prompt)}")
        if not request.temperature >= 0:
            raise ValueError(f"temperature must not be negative, got {request.temperature}")
        if request.id in self._ids:
            raise ValueError(f"request {request.id!r} is under way already")
        answer = Answer(request)
        if so_far is not None:
            if so_far.request.prompt != request.prompt:
                raise ValueError("so_far must be an answer to the same prompt, got another's")
            answer.ids, answer.log_probs, answer.versions = list(so_far.ids), list(so_far.log_probs), list(so_far.versions)
        self.waiting.append(answer)
        self._ids.add(request.id)

    def abort(self, request_id: Hashable) -> Answer:
        """Take a request back, with what it has; its cache is kept as a start. KeyError: it is not under way."""
        for answer in self.waiting:
            if answer.request.id == request_id:
                self.waiting.remove(answer)
                return self._ended(answer, None, "aborted")
        for slot in self._slots:
            if slot.answer is not None and slot.answer.request.id == request_id:
                return self._ended(slot.answer, slot, "aborted")
        raise KeyError(request_id)

    def update(self, apply: Callable[[], object], version: int) -> None:
        """Change the model's weights by calling `apply`; tokens from now on carry `version`. If it raises, nothing has changed."""
        if version < self.version:
            raise ValueError(f"version must not be less than {self.version}, got {version}")
        with torch.no_grad():
            apply()
        self.version = version
        if self.recompute:
            for slot in list(self._slots):
                if slot.answer is None:
                    self._free(slot)
                else:
                    self.cache.truncate(slot.row, 0)
                    slot.tokens, slot.experts, slot.oldest = [], [], version

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """One forward pass; returns the answers that ended with it, none where nothing is under way."""
        self._clock += 1
        self._admit()
        work = self._work()
        if not work:
            return []
        ids = torch.tensor([token for _, tokens in work for token in tokens])
        lengths = [len(tokens) for _, tokens in work]
        x_TD, routings = self.model.trunk(ids, cache=self.cache, slots=[slot.row for slot, _ in work], lengths=lengths)
        experts = torch.stack([r.ids for r in routings], 1).to(torch.int16).numpy() if routings else None
        ends = np.cumsum(lengths)
        due = []
        for (slot, tokens), end in zip(work, ends.tolist(), strict=True):
            slot.tokens += tokens
            slot.used = self._clock
            if experts is not None:
                slot.experts.append(experts[end - len(tokens) : end])
            if len(slot.tokens) == len(slot.answer.request.prompt) + len(slot.answer.ids):
                due.append((slot, end - 1))
        self.read_tokens += int(ends[-1])
        return self._sample(due, x_TD) if due else []

    def _sample(self, due: list[tuple[_Slot, int]], x_TD: Tensor) -> list[Answer]:
        logits = self.model.head(x_TD[[row for _, row in due]]).float()
        temperatures = torch.tensor([slot.answer.request.temperature for slot, _ in due])
        scaled = logits / temperatures.where(temperatures > 0, 1.0)[:, None]
        log_probs = scaled - scaled.logsumexp(1, keepdim=True)  # as rl.objective.token_log_probs has it
        draws = torch.tensor([uniform(slot.answer) for slot, _ in due], dtype=torch.float64)
        cumulative = log_probs.double().exp().cumsum(1)
        drawn = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0]
        drawn = drawn.clamp(max=logits.shape[1] - 1)
        chosen = drawn.where(temperatures > 0, logits.argmax(1))
        chosen_log_probs = log_probs.gather(1, chosen[:, None])[:, 0].tolist()
        ended = []
        for (slot, _), token, log_prob in zip(due, chosen.tolist(), chosen_log_probs, strict=True):
            answer = slot.answer
            answer.ids.append(token)
            answer.log_probs.append(log_prob)
            answer.versions.append(self.version)
            if token in answer.request.stop:
                ended.append(self._ended(answer, slot, "stop"))
            elif len(answer.ids) == answer.request.max_new:
                ended.append(self._ended(answer, slot, "length"))
        self.new_tokens += len(due)
        return ended

    def _work(self) -> list[tuple[_Slot, list[int]]]:
        """What each slot under way reads in this step: an answer's last token, or its prompt, as far as the budget goes."""
        work, budget = [], self.prefill_tokens
        for slot in self._slots:
            if slot.answer is None:
                continue
            whole = [*slot.answer.request.prompt, *slot.answer.ids]
            missing = whole[len(slot.tokens) :]
            if len(missing) == 1:
                work.append((slot, missing))
            elif budget:
                work.append((slot, missing[:budget]))
                budget -= len(missing[:budget])
        return work

    def _admit(self) -> None:
        """Give waiting requests a slot, in order; one whose beginning another is just reading waits for it."""
        while self.waiting:
            answer = self.waiting[0]
            whole = [*answer.request.prompt, *answer.ids]
            start, length = self._best_start(answer.request, whole)
            if any(
                min(common(self._whole(slot), whole), len(whole) - 1) > max(length, len(slot.tokens))
                for slot in self._slots
                if slot.answer is not None and len(slot.tokens) < len(slot.answer.request.prompt)
            ):
                return
            slot = self._slot_for(answer, whole, start, length)
            if slot is None:
                return
            self.waiting.popleft()
            slot.answer, slot.session, slot.used = answer, answer.request.session, self._clock
            self.copied_tokens += length

    def _slot_for(self, answer: Answer, whole: list[int], start: _Slot | None, length: int) -> _Slot | None:
        """A slot with the first `length` tokens of `start`: a copy where there is room, or the start itself. None: no room."""
        kept = start is not None and start.answer is None
        if not (kept and len(start.tokens) == length) and self._make_room(start):
            row = self.cache.allocate(like=start.row, length=length) if start else self.cache.allocate()
            experts = [np.concatenate(start.experts)[:length]] if start and start.experts else []
            slot = _Slot(row, whole[:length], experts, start.oldest if start else self.version, None, None)
            self._slots.append(slot)
            return slot
        if kept:
            self.cache.truncate(start.row, length)
            start.tokens = start.tokens[:length]
            start.experts = [np.concatenate(start.experts)[:length]] if start.experts else []
            return start
        return None

    def _best_start(self, request: Request, whole: list[int]) -> tuple[_Slot | None, int]:
        """The slot that holds the longest beginning of `whole`, all of it but a token at most, and how long."""
        best, length = None, 0
        for slot in self._slots:
            own = request.session is not None and slot.session == request.session
            if own or slot.oldest == self.version:
                found = min(common(slot.tokens, whole), len(whole) - 1)  # the last one is read for its logits
                if found > length:
                    best, length = slot, found
        return best, length

    def _make_room(self, start: _Slot | None) -> bool:
        """A free row of the cache, if need be that of the start used longest ago."""
        if None in self.cache.lengths:
            return True
        kept = [slot for slot in self._slots if slot.answer is None and slot is not start]
        if kept:
            self._free(min(kept, key=lambda slot: slot.used))
        return bool(kept)

    def _whole(self, slot: _Slot) -> list[int]:
        return [*slot.answer.request.prompt, *slot.answer.ids]

    def _free(self, slot: _Slot) -> None:
        self.cache.free(slot.row)
        self._slots.remove(slot)

    def _ended(self, answer: Answer, slot: _Slot | None, end: str) -> Answer:
        answer.end = end
        self._ids.discard(answer.request.id)
        layers, top_k = len(self.model.moe_layers), self.model.config.top_k
        answer.experts = np.full((len(answer.request.prompt) + len(answer.ids), layers, top_k), NO_EXPERT, np.int16)
        if slot is not None:
            if slot.experts:
                read = np.concatenate(slot.experts)
                answer.experts[: len(read)] = read
            slot.answer = None
        return answer

    def run(self) -> list[Answer]:
        """Step until nothing is under way."""
        answers = []
        while self.active:
            answers += self.step()
        return answers


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def uniform(answer: Answer) -> float:
    """The draw for the next token of an answer: Philox keyed by seed and sample, at its position."""
    request = answer.request
    bits = np.random.Philox(key=[request.seed % 2**64, request.sample % 2**64], counter=[len(answer.ids), 0, 0, 0])
    return float(np.random.Generator(bits).random())
