"""Answers of a sample under way, so that it goes on where it was when its worker, its node of sandboxes or the whole run died.

A file per sample, a line per answer. Whoever carries the sample out again is given the answers back as long as the prompts are
those that were answered: calls are done again in a new sandbox, which brings back files and processes alike, and where one of them
gives another output the rest is forgotten and sampled. So a model is trained on nothing that its environment did not say.
"""

import base64
import hashlib
import json
import os
from collections import deque
from pathlib import Path

import numpy as np

from rl.harness.builtin import Answers
from rl.sampler import Answer, Request

LISTS = ("ids", "log_probs", "versions")


class Kept:
    """Answers of `answers` to one sample's requests, kept in a file; those that the file has already are not asked for again."""

    def __init__(self, answers: Answers, path: Path):
        self.capacity = answers.capacity
        self._answers, self._path = answers, path
        self._known = deque(_lines(path))
        self._given: list[str] = []
        self._file = None

    def answer(self, request: Request, deadline: float) -> Answer | None:
        if self._known:
            line = self._known.popleft()
            if (answer := _read(line, request)) is not None:
                self._given.append(line)
                return answer
            self._known.clear()
        answer = self._answers.answer(request, deadline)
        if answer is not None:
            self._add(_written(answer))
        return answer

    def _add(self, line: str) -> None:
        if self._file is None:  # the first new one takes the place of what was not given back
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.urandom(4).hex()}.part")
            self._file = part.open("w")
            self._file.writelines(self._given)
            self._file.flush()
            os.replace(part, self._path)
        self._file.write(line)
        self._file.flush()

    def drop(self) -> None:
        """Of a sample that has ended."""
        self._path.unlink(missing_ok=True)


def _digest(request: Request) -> str:
    """Of all that an answer depends on but the weights."""
    asked = request.prompt, request.max_new, sorted(request.stop), request.temperature, request.seed, request.sample
    return hashlib.sha256(repr(asked).encode()).hexdigest()


def _written(answer: Answer) -> str:
    fields = {name: getattr(answer, name) for name in (*LISTS, "end")} | {"request": _digest(answer.request)}
    if answer.experts is not None:
        experts = np.ascontiguousarray(answer.experts, np.int16)
        fields["experts"] = [experts.shape, base64.b64encode(experts.tobytes()).decode()]
    return json.dumps(fields) + "\n"


def _lines(path: Path) -> list[str]:
    """Those that were written whole."""
    try:
        return [line for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]
    except (FileNotFoundError, UnicodeDecodeError):
        return []


def _read(line: str, request: Request) -> Answer | None:
    """The answer, if it was one to this request and is not damaged."""
    try:
        fields = json.loads(line)
        if fields["request"] != _digest(request):
            return None
        experts = None
        if "experts" in fields:
            shape, data = fields["experts"]
            experts = np.frombuffer(base64.b64decode(data), np.int16).reshape(shape).copy()
        answer = Answer(request, *(list(fields[name]) for name in LISTS), experts, fields["end"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return answer if len({len(getattr(answer, name)) for name in LISTS}) == 1 else None
