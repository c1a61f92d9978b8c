"""Dialects: conversations as tokens and replies as calls; the terse one over the tools' own schema."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.harness.builtin import SamplerModel
from rl.harness.dialect import TERSE, ChatDialect, TerseDialect, spelt
from rl.harness.session import Session
from rl.harness.toolsets import ALL, tool_set
from rl.sampler import Answer
from training.data.tokenizer import FAMILIES, OWN, Vocabulary, train_tokenizer

CALLS = [
    ("read kobi.py", "read_file", {"path": "kobi.py"}),
    ("read kobi.py 3 20", "read_file", {"path": "kobi.py", "offset": 3, "limit": 20}),
    ("edit kobi.py 3 x = sorted(x)", "edit_line", {"path": "kobi.py", "line": 3, "text": "x = sorted(x)"}),
    ("edit kobi.py 3 x = 1\nreturn  x ", "edit_line", {"path": "kobi.py", "line": 3, "text": "x = 1\nreturn  x "}),
    ("test", "run_check", {}),
    ("done", "finish", {}),
    ("done all is well", "finish", {"answer": "all is well"}),
]
WRONG = [
    "",
    " ",
    "reed kobi.py",
    "edit",
    "edit kobi.py",
    "edit kobi.py three x",
    "edit kobi.py 3",
    "read a b c d",
    "read a 1.5",
    "\n",
    "read",
]


def vocabulary(family=OWN):
    return Vocabulary(train_tokenizer(["def f(x): return x"] * 9, 256 + len(family.special) + 4, family.special), family)


@pytest.fixture(scope="module")
def terse():
    return TerseDialect(vocabulary())


def reply(dialect, text):
    return [*dialect.vocabulary.encode(text), dialect.turn]


@pytest.mark.parametrize(("text", "name", "arguments"), CALLS)
def test_a_terse_reply_is_a_call_of_the_schema_and_back(terse, text, name, arguments):
    said, thinking, ((called, written),) = terse.parsed(reply(terse, text))
    assert (said, thinking, called, json.loads(written)) == ("", "", name, arguments)
    assert spelt(terse.verb_of, called, written) == text


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_call_is_answered_with_an_error(terse, text):
    _, _, ((name, arguments),) = terse.parsed(reply(terse, text))
    result = tool_set(list(TERSE.values())).call(Session(None), name, arguments)
    assert (result.kind, result.text[:5]) == ("invalid", "Error")


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 260), max_size=12))
def test_any_tokens_are_a_text_or_one_call(ids):
    dialect = DIALECT
    text, _, calls = dialect.parsed(ids)
    cut = not ids or ids[-1] not in dialect.stop
    assert len(calls) == (0 if cut else 1)
    for name, arguments in calls:
        assert (type(name), type(json.loads(arguments)), text) == (str, dict, "")


DIALECT = TerseDialect(vocabulary())


def test_a_reply_that_was_cut_calls_nothing(terse):
    assert terse.parsed(terse.vocabulary.encode("edit kobi.py 3 x = so")) == ("edit kobi.py 3 x = so", "", [])


def test_verbs_are_tools_that_there_are():
    assert set(TERSE.values()) <= {tool.name for tool in ALL}
    with pytest.raises(KeyError):
        TerseDialect(vocabulary(), {"fly": "no_such"})
    verbs = {"ls": "list_dir"}
    made = TerseDialect(vocabulary(), verbs)
    assert made.parsed(reply(made, "ls src 2"))[2] == [("list_dir", '{"path": "src", "depth": 2}')]


@pytest.mark.parametrize("make", [ChatDialect, TerseDialect])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.messages], ids=["own", "deepseek", "kimi", "qwen"])
def test_a_conversation_grows_by_its_end(make, family):
    """What follows a reply are the ids that the whole conversation has there."""
    dialect = make(vocabulary(family))
    asked = [{"role": "user", "content": "Write kobi in a.py."}]
    call = {"id": "0", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    gave = {"role": "tool", "tool_call_id": "0", "content": "1\tdef kobi(x):\n2\t    return x"}
    start, more, whole = dialect.prompt(asked, []), dialect.more([gave]), dialect.prompt([*asked, said, gave], [])
    between = whole[len(start) : len(whole) - len(more)]
    assert whole == [*start, *between, *more]
    assert between[-1] in dialect.stop
    assert dialect.parsed(between)[2] == [("read_file", '{"path": "a.py"}')]


def test_system_messages_are_not_told_in_terse(terse):
    user = {"role": "user", "content": "Fix it."}
    assert terse.prompt([{"role": "system", "content": "You are."}, user], []) == terse.prompt([user], [])


class Scripted:
    """Answers with what it was told to."""

    capacity = 300

    def __init__(self, *replies):
        self.replies, self.requests = list(replies), []

    def answer(self, request, deadline):
        self.requests.append(request)
        ids = self.replies.pop(0)
        return Answer(request, ids, [-0.5] * len(ids), [0] * len(ids), None, "stop" if ids[-1] in request.stop else "length")


def test_the_model_needs_an_answer_and_a_capacity_only(terse):
    cut = terse.vocabulary.encode("read a")
    shared = Scripted(reply(terse, "read a.py"), cut, reply(terse, "done"))
    model = SamplerModel(shared, terse, seed=3, sample=5)
    tools, messages = tool_set(list(TERSE.values())), [{"role": "user", "content": "Fix it."}]
    for content in ("1\tx", "Go on."):
        said = model.reply(messages, tools.schemas, 40, 5.0)
        messages += [said.message, {"role": "tool" if said.calls else "user", "content": content}]
    assert [c.name for c in model.reply(messages, tools.schemas, 40, 5.0).calls] == ["finish"]
    first, second, third = (list(request.prompt) for request in shared.requests)
    assert second[: len(first) + len(reply(terse, "read a.py"))] == [*first, *reply(terse, "read a.py")]
    assert third[: len(second) + len(cut) + 1] == [*second, *cut, terse.turn]  # its end is put behind a cut reply
    assert [request.sample for request in shared.requests] == [5, 6, 7]
