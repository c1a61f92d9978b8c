"""A model of this project as the loop's model: tokens in, tokens out, over the built-in sampler (rl.sampler).

What the model wrote is never encoded again: the next prompt is the last prompt, the tokens of its reply as they were sampled, and
the new messages in the tokenizer's own format of conversations (training.data). So what is trained on is what was sampled.
"""

import json
import threading
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from rl.harness import prompt
from rl.harness.model import Call, Message, ModelError, Reply
from rl.sampler import Answer, Request, Sampler
from training.data.encode import render
from training.data.tokenizer import Vocabulary


class Shared:
    """A sampler that threads step by turns, and answers that one of them found for another."""

    def __init__(self, sampler: Sampler):
        self.sampler, self.lock, self.ended = sampler, threading.Lock(), {}

    def answer(self, request: Request, deadline: float) -> Answer | None:
        """Blocks; None where it is not there at the deadline."""
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
        shared: Shared,
        vocabulary: Vocabulary,
        *,
        name: str = "built-in",
        temperature: float = 1.0,
        seed: int = 0,
        sample: int = 0,
    ):
        self.shared, self.vocabulary, self.name = shared, vocabulary, name
        self.temperature, self.seed, self.sample = temperature, seed, sample
        self.answers: list[Answer] = []  # with versions and experts, in the order of replies
        self._said: list[Message] = []  # what the tokens so far stand for
        self._ids: list[int] = []
        after = vocabulary.encode_template(vocabulary.family.messages["assistant"][1])
        self._turn, self._rest = after[0], after[1:]

    def reply(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], max_tokens: int, timeout_s: float) -> Reply:
        start = time.monotonic()
        messages = [dict(message) for message in messages]
        ids = self._prompt(messages, tools)
        capacity = self.shared.sampler.cache.capacity
        room = capacity - len(ids)
        if room < 1:
            raise ModelError(f"{self.name}: the prompt has {len(ids)} tokens, the cache holds {capacity}")
        number = next(self.numbers)
        stop = frozenset((self._turn, self.vocabulary.eos))
        request = Request(
            number, tuple(ids), min(max_tokens, room), stop, self.temperature, self.seed, self.sample + len(self.answers), id(self)
        )
        answer = self.shared.answer(request, start + timeout_s)
        if answer is None:
            raise ModelError(f"{self.name}: no reply in {timeout_s:.0f} s")
        self.answers.append(answer)
        reply = self._reply(answer, time.monotonic() - start)
        self._said, self._ids = [*messages, reply.message], [*ids, *answer.ids]
        return reply

    def _prompt(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the conversation: those known already, and what is new behind them."""
        known = len(self._said)
        if known and messages[:known] == self._said:
            ids = self._ids if self._ids[-1] in (self._turn, self.vocabulary.eos) else [*self._ids, self._turn]
            return [*ids, *self._rest, *self._render(messages[known:])[1:]]  # without the token that begins a document
        return self._render(prompt.with_tools(messages, tools))

    def _render(self, messages: list[Message]) -> list[int]:
        fine = [m | {"tool_calls": [c for c in m["tool_calls"] if is_call(c)]} if "tool_calls" in m else m for m in messages]
        return render(fine, self.vocabulary, reply=True)[0]

    def _reply(self, answer: Answer, seconds: float) -> Reply:
        text, thinking, calls = prompt.parsed(self._text(answer.ids))
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

    def _text(self, ids: list[int]) -> str:
        """A reply's text with calls between the tags of `prompt`, whatever the tokenizer's own are."""
        opening, closing = (self.vocabulary.encode_template(mark.strip())[:1] for mark in self.vocabulary.family.messages["call"])
        out, part, is_call = "", [], False
        for token in [*ids, self._turn]:
            ends = token in (self._turn, self.vocabulary.eos)
            if [token] in (opening, closing) or ends:
                out += self.vocabulary.decode(part) + ("</tool_call>" if is_call else "")
                part, is_call = [], [token] == opening
                out += "<tool_call>" if is_call else ""
            else:
                part.append(token)
        return out


def is_call(call: dict[str, Any]) -> bool:
    """Whether a call of a conversation can be written in the tokenizer's format: its arguments are JSON."""
    try:
        return bool(call["function"]["name"]) and isinstance(json.loads(call["function"]["arguments"] or "{}"), dict)
    except ValueError:
        return False
