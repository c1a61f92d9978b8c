"""What a run leaves to train on, token by token: hand-written conversations through the agent loop, in both dialects.

Replies are sampled letter by letter, as no encoder would write them: whatever is encoded again would show.
"""

import re

import pytest

from rl.environments import open_backend
from rl.environments.sandbox import SandboxSpec
from rl.harness import prompt
from rl.harness.builtin import SamplerModel
from rl.harness.dialect import TERSE, ChatDialect, TerseDialect
from rl.harness.loop import CONTINUE, CUT, SUMMARY, SYSTEM, LoopLimits, run
from rl.harness.session import Session
from rl.harness.toolsets import tool_set
from rl.sampler import Answer
from rl.segments import segments_of
from tests.test_dialect import vocabulary

WORDS, MARK = vocabulary(), re.compile(r"(<\|[a-z]+\|>)")
TURNS, SECONDS = 9, 60
READ_A, READ_B = (f'<|call|>{{"name": "read_file", "arguments": {{"path": "{name}.py"}}}}' for name in "ab")


def given(text):
    """As the conversation's format has it: special tokens, and texts as they are encoded."""
    return [t for part in MARK.split(text) for t in ([WORDS.token(part)] if MARK.fullmatch(part) else WORDS.encode(part))]


def letters(text):
    """As a sampler may choose them: special tokens, and the tokens of single letters."""
    return [token for part in MARK.split(text) for piece in ([part] if MARK.fullmatch(part) else part) for token in given(piece)]


class Scripted:
    """Samples what it was told to; the k-th token of a run has log-probability -k / 16 and version k // 3."""

    def __init__(self, replies, capacity=100_000):
        self.replies, self.capacity, self.count = list(replies), capacity, 0

    def answer(self, request, deadline):
        ids = letters(self.replies.pop(0))
        numbers = range(self.count, self.count + len(ids))
        self.count += len(ids)
        end = "stop" if ids[-1] in request.stop else "length"
        return Answer(request, ids, [-k / 16 for k in numbers], [k // 3 for k in numbers], None, end)


@pytest.fixture(scope="module")
def backend():
    with open_backend("subprocess", allow="all") as opened:
        yield opened


def carried_out(backend, dialect, names, replies, said=(), capacity=100_000, **limits):
    """(trajectory, segments). said: what the user says before each reply."""
    said = iter(said)
    model = SamplerModel(Scripted(replies, capacity), dialect)
    with backend.create(SandboxSpec(workdir="/")) as sandbox:
        for name, data in (("a", b"x = 1\n"), ("b", b"y = 2\n")):
            sandbox.write(f"/workspace/{name}.py", data)
        limits = LoopLimits(turns=TURNS, seconds=SECONDS, **limits)
        done = run(model, Session(sandbox), tool_set(names), "Fix it.", limits, inbox=lambda: next(said, ()))
    return done, segments_of(model.answers)


def check(segments, golden):
    """golden: of each segment, texts by turns given and sampled."""
    assert len(segments) == len(golden)
    k = 0
    for segment, texts in zip(segments, golden, strict=True):
        expected = []  # (id, mask, log-probability, version)
        for i, text in enumerate(texts):
            if i % 2:
                ids = letters(text)
                expected += [(token, True, -n / 16, n // 3) for n, token in enumerate(ids, k)]
                k += len(ids)
            else:
                expected += [(token, False, 0.0, -1) for token in given(text)]
        found = list(zip(segment.ids, segment.mask, segment.log_probs, segment.versions, strict=True))
        assert found == expected


TERSE_CHAIN = [
    [
        "<|end|><|user|>Fix it.<|turn|><|assistant|>",
        "read a.py<|turn|>",
        "<|tool|>1\tx = 1<|turn|><|user|>Be quick.<|turn|><|assistant|>",
        "edit a.py",  # cut: its end is given
        f"<|turn|><|user|>{CUT}<|turn|><|assistant|>",
        "read b.py<|turn|>",
        f"<|tool|>1\ty = 2<|turn|><|user|>{SUMMARY}<|turn|><|assistant|>",
        "return what def says: read a.py<|turn|>",
    ],
    [
        "<|end|><|user|>Fix it.<|turn|><|user|>"
        + CONTINUE.format(summary="return what def says: read a.py")
        + "<|turn|><|assistant|>",
        "read a.py<|end|>",  # ended by the other stop
        "<|tool|>1\tx = 1<|turn|><|assistant|>",
        "done<|turn|>",
    ],
]


def length(texts):
    return sum(len(letters(text) if i % 2 else given(text)) for i, text in enumerate(texts))


def test_a_chain_in_the_terse_dialect(backend):
    """A tool, an interruption by the user, a cut reply, a summary that looks like a call, and what follows from it."""
    replies = [text for texts in TERSE_CHAIN for text in texts[1::2]]
    said, trigger = [(), ("Be quick.",)], length(TERSE_CHAIN[0][:6]) - 1
    done, segments = carried_out(backend, TerseDialect(WORDS), list(TERSE.values()), replies, said, context_tokens=trigger)
    assert done.end == "finished"
    check(segments, TERSE_CHAIN)
    assert [call.name for call, _ in done.calls] == ["read_file", "read_file", "read_file", "finish"]
    sampled = [token for s in segments for token, m in zip(s.ids, s.mask, strict=True) if m]
    text = WORDS.decode(sampled)
    assert len(WORDS.encode(text)) < len(sampled) - len(replies)  # an encoder would have written other tokens


def test_a_chain_in_the_chat_dialect(backend):
    """Parallel calls, an interruption, a cut reply, a summary."""
    names = ["read_file", "finish"]
    tools = tool_set(names)
    system = SYSTEM.format(workdir="/workspace", seconds=SECONDS, turns=TURNS, done="call finish")
    (described,) = prompt.with_tools([{"role": "system", "content": system}], tools.schemas)
    golden = [
        [
            f"<|end|><|system|>{described['content']}<|turn|><|user|>Fix it.<|turn|><|assistant|>",
            f"I look.{READ_A}{READ_B}<|turn|>",
            "<|tool|>1\tx = 1<|turn|><|tool|>1\ty = 2<|turn|><|user|>Be quick.<|turn|><|assistant|>",
            "I am ret",
            f"<|turn|><|user|>{CUT}<|turn|><|assistant|>",
            f"{READ_B}<|turn|>",
            f"<|tool|>1\ty = 2<|turn|><|user|>{SUMMARY}<|turn|><|assistant|>",
            "def returns x<|turn|>",
        ],
        [
            f"<|end|><|system|>{described['content']}<|turn|><|user|>Fix it.<|turn|><|user|>"
            + CONTINUE.format(summary="def returns x")
            + "<|turn|><|assistant|>",
            '<|call|>{"name": "finish", "arguments": {"answer": "x"}}<|turn|>',
        ],
    ]
    replies = [text for texts in golden for text in texts[1::2]]
    trigger = length(golden[0][:6]) - 1
    done, segments = carried_out(backend, ChatDialect(WORDS), names, replies, [(), ("Be quick.",)], context_tokens=trigger)
    assert done.end == "finished"
    check(segments, golden)


@pytest.mark.parametrize("summarizes", [False, True])
def test_a_conversation_that_has_no_room_left_ends_and_is_kept(backend, summarizes):
    """It is the work's own end, to be verified and trained on; also where it is the summary that has no room."""
    texts = TERSE_CHAIN[0][:2]
    capacity = length(texts) + 2
    limits = {"context_tokens": 1} if summarizes else {}
    done, segments = carried_out(backend, TerseDialect(WORDS), list(TERSE.values()), texts[1:], capacity=capacity, **limits)
    assert done.end == "tokens"
    assert f"the cache holds {capacity}" in done.error
    check(segments, [texts])
