"""Answers of samples under way: given back to the same prompts and to no others, whatever became of their file."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.sampler import Answer, Request
from rl.underway import Kept


class Asked:
    """Answers at random, and notes what it was asked."""

    capacity = 100

    def __init__(self):
        self.requests, self.draws = [], random.Random(0)

    def answer(self, request, deadline):
        self.requests.append(request)
        if request.max_new == 0:  # not there in time
            return None
        count = self.draws.randrange(1, 5)
        experts = np.array([[[self.draws.randrange(9) for _ in range(3)]] for _ in range(count)], np.int16)
        numbers = [self.draws.random() for _ in range(count)]
        return Answer(request, [*range(count)], numbers, [7] * count, None if count == 3 else experts, "stop")


def conversation(answers, requests):
    return [answers.answer(request, 0.0) for request in requests]


def requests_of(number, first_id=0, **changes):
    return [Request(first_id + i, (1, 2, i), 5, frozenset((3, 4)), 1.0, 11, i, session=first_id, **changes) for i in range(number)]


def same(one, other):
    """All but the names of request and session, which are a process's own."""
    experts = one.experts is other.experts or np.array_equal(one.experts, other.experts)
    told = ((a.request.prompt, a.ids, a.log_probs, a.versions, a.end) for a in (one, other))
    return experts and len(set(map(repr, told))) == 1


@given(st.integers(0, 6), st.integers(0, 6), st.floats(0, 1))
@settings(max_examples=60)
def test_the_answers_of_whole_lines_come_back_and_the_rest_is_asked_again(tmp_path_factory, first, second, share):
    path = tmp_path_factory.mktemp("kept") / "sample.jsonl"
    before = conversation(Kept(Asked(), path), requests_of(first))
    data = path.read_bytes() if first else b""
    cut = int(share * len(data))
    whole = data[:cut].count(b"\n")
    if first:
        path.write_bytes(data[:cut])
    asked = Asked()
    after = conversation(Kept(asked, path), requests_of(second, first_id=1000))
    assert all(same(*pair) for pair in zip(before[:whole], after, strict=False))
    assert [request.id for request in asked.requests] == [1000 + i for i in range(whole, second)]
    third = Asked()
    again = conversation(Kept(third, path), requests_of(max(whole, second), first_id=2000))
    assert not third.requests
    assert all(same(*pair) for pair in zip(after, again, strict=False))


CHANGES = dict(prompt=(1, 2, 9), max_new=6, stop=frozenset((3,)), temperature=0.5, seed=12, sample=9)


@pytest.mark.parametrize("name", CHANGES)
def test_another_request_makes_the_rest_forgotten(tmp_path, name):
    path = tmp_path / "sample.jsonl"
    before = conversation(Kept(Asked(), path), requests_of(4))
    others = requests_of(4, 1000)
    others[2] = Request(**{field: getattr(others[2], field) for field in Request.__dataclass_fields__} | {name: CHANGES[name]})
    asked = Asked()
    after = conversation(Kept(asked, path), others)
    assert [request.id for request in asked.requests] == [1002, 1003]
    third = Asked()
    again = conversation(Kept(third, path), others)
    assert not third.requests
    assert all(same(*pair) for pair in zip([*before[:2], *after[2:]], again, strict=True))


DAMAGE = [b"\xff\n", b"{}\n", b"[1]\n", b"null\n", b"\n", b'{"request": 1, "ids": 5}\n', b"[" * 9999 + b"\n"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_ends_what_comes_back(tmp_path, damage):
    path = tmp_path / "sample.jsonl"
    conversation(Kept(Asked(), path), requests_of(3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + damage + lines[2])
    asked = Asked()
    assert all(conversation(Kept(asked, path), requests_of(3)))
    assert [request.id for request in asked.requests][-2:] == [1, 2]


def test_lists_of_several_lengths_are_no_answer(tmp_path):
    path = tmp_path / "sample.jsonl"
    [answer] = conversation(Kept(Asked(), path), requests_of(1))
    path.write_text(path.read_text().replace('"versions": [', '"versions": [7, '))
    asked = Asked()
    [other] = conversation(Kept(asked, path), requests_of(1))
    assert asked.requests
    assert same(answer, other)


def test_no_answer_in_time_is_not_kept(tmp_path):
    kept = Kept(Asked(), tmp_path / "sample.jsonl")
    late = Request(0, (1,), 0)
    assert kept.answer(late, 0.0) is None
    kept.drop()
    assert not list(tmp_path.iterdir())
    kept = Kept(Asked(), tmp_path / "sample.jsonl")
    conversation(kept, requests_of(1))
    assert [path.name for path in tmp_path.iterdir()] == ["sample.jsonl"]
    kept.drop()
    kept.drop()
    assert not list(tmp_path.iterdir())
