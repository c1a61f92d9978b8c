"""A model of this project as the loop's model: tokens in, tokens out, over the built-in sampler (rl.sampler).

What the model wrote is never encoded again: the next prompt is the last prompt, the tokens of its reply as they were sampled, and
the new messages as the dialect writes them. So what is trained on is what was sampled.
"""

import threading
import time
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

from rl.harness.dialect import Dialect
from rl.harness.model import Call, ContextFull, Message, ModelError, Reply
from rl.sampler import Answer, Request, Sampler


class Answers(Protocol):
    """Whatever answers requests. capacity: tokens of a prompt and its reply, at most."""

    capacity: int

    def answer(self, request: Request, deadline: float) -> Answer | None:
        """Blocks; None where it is not there at the deadline (of `time.monotonic`)."""


class Shared:
    """A sampler that threads step by turns, and answers that one of them found for another."""

    def __init__(self, sampler: Sampler):
        self.sampler, self.lock, self.ended = sampler, threading.Lock(), {}
        self.capacity = sampler.cache.capacity

    def answer(self, request: Request, deadline: float) -> Answer | None:
        with self.lock:
            self.sampler.submit(request)
        while True:
            with self.lock:
                if request.id not in self.ended:
                    self.ended.update({answer.request.id: answer for answer in self.sampler.step()})
                if request.id in self.ended:
                    return self.ended.pop(request.id)
                if time.monotonic() > deadline:
                    self.sampler.abort(request.id)
                    return None


class SamplerModel:
    """One conversation; several, each in a thread, may share one sampler.

    temperature  0 takes the likeliest token
    seed, sample what the choices are keyed by
    """

    numbers = count()

    def __init__(
        self,
        shared: Answers,
        dialect: Dialect,
        *,
        name: str = "built-in",
        temperature: float = 1.0,
        seed: int = 0,
        sample: int = 0,
    ):
        self.shared, self.dialect, self.name = shared, dialect, name
        self.temperature, self.seed, self.sample = temperature, seed, sample
        self.answers: list[Answer] = []  # with versions and experts, in the order of replies
        self._session = next(self.numbers)  # not id(self), which a later conversation may have, too
        self._said: list[Message] = []  # what the tokens so far stand for
        self._ids: list[int] = []

    def reply(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], max_tokens: int, timeout_s: float) -> Reply:
        start = time.monotonic()
        messages = [dict(message) for message in messages]
        ids = self._prompt(messages, tools)
        room = self.shared.capacity - len(ids)
        if room < 1:
            raise ContextFull(f"{self.name}: the prompt has {len(ids)} tokens, the cache holds {self.shared.capacity}")
        number, sample, stop = next(self.numbers), self.sample + len(self.answers), self.dialect.stop
        request = Request(number, tuple(ids), min(max_tokens, room), stop, self.temperature, self.seed, sample, self._session)
        answer = self.shared.answer(request, start + timeout_s)
        if answer is None:
            raise ModelError(f"{self.name}: no reply in {timeout_s:.0f} s")
        self.answers.append(answer)
        reply = self._reply(answer, bool(tools), time.monotonic() - start)
        self._said, self._ids = [*messages, reply.message], [*ids, *answer.ids]
        return reply

    def _prompt(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the conversation: those known already, and what is new behind them."""
        known = len(self._said)
        if known and messages[:known] == self._said:
            ids = self._ids if self._ids[-1] in self.dialect.stop else [*self._ids, self.dialect.turn]
            return [*ids, *self.dialect.more(messages[known:])]
        return self.dialect.prompt(messages, tools)

    def _reply(self, answer: Answer, may_call: bool, seconds: float) -> Reply:
        text, thinking, calls = self.dialect.parsed(answer.ids) if may_call else (self.dialect.text(answer.ids), "", [])
        return Reply(
            text,
            tuple(Call(f"call_{len(self.answers)}_{i}", name, arguments) for i, (name, arguments) in enumerate(calls)),
            thinking,
            len(answer.request.prompt),
            len(answer.ids),
            "length" if answer.end == "length" else "tool_calls" if calls else "stop",
            answer.request.prompt,
            tuple(answer.ids),
            tuple(answer.log_probs),
            seconds,
        )
