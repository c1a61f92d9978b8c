"""The loop with scripted models, a server of this process that speaks the chat protocol, and trajectories that replay."""

import json

import pytest

from rl.environments import open_backend
from rl.environments.sandbox import SandboxSpec
from rl.harness.loop import CUT, SUMMARY, LoopLimits, run
from rl.harness.model import Call, ChatServer, ModelError, Reply, ScriptedModel
from rl.harness.session import Session
from rl.harness.toolsets import tool_set
from rl.harness.trajectory import replies_of
from tests.chat_server import delta, serving, stream


@pytest.fixture(scope="module")
def backend():
    with open_backend("subprocess", allow="all") as opened:
        yield opened


@pytest.fixture
def session(backend):
    with backend.create(SandboxSpec(workdir="/")) as sandbox:
        sandbox.write("/workspace/price.py", b"def total(prices):\n    return prices[0]\n")
        yield Session(sandbox)


def calling(*calls, **fields):
    made = tuple(Call(f"c{i}", name, json.dumps(arguments)) for i, (name, arguments) in enumerate(calls))
    return Reply(calls=made, completion_tokens=10, prompt_tokens=100, **fields)


SOLUTION = [
    calling(("list_dir", {}), ("read_file", {"path": "price.py"}), text="I look."),
    calling(("edit_file", {"path": "price.py", "old": "prices[0]", "new": "sum(prices)"})),
    calling(("shell", {"command": "python3 -c 'from price import total; print(total([1, 2]))'"})),
    calling(("finish", {"answer": "total adds up"})),
]


def test_a_scripted_agent_solves_a_task(session):
    model = ScriptedModel(SOLUTION)
    done = run(model, session, tool_set(), "Fix total.")
    assert done.end == "finished"
    assert session.answer == "total adds up"
    assert session.sandbox.read("/workspace/price.py") == b"def total(prices):\n    return sum(prices)\n"
    assert done.calls[3][1].text == "3"
    assert [m["role"] for m in model.seen[-1]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert model.seen[-1][4] == {"role": "tool", "tool_call_id": "c1", "content": "1\tdef total(prices):\n2\t    return prices[0]"}
    assert done.completion_tokens == 40


def test_a_stored_run_replays_to_the_same(session, backend, tmp_path):
    first = run(ScriptedModel(SOLUTION), session, tool_set(), "Fix total.")
    first.save(tmp_path / "t.json")
    stored = json.loads((tmp_path / "t.json").read_text())
    with backend.create(SandboxSpec(workdir="/")) as sandbox:
        sandbox.write("/workspace/price.py", b"def total(prices):\n    return prices[0]\n")
        again = run(ScriptedModel(replies_of(stored)), Session(sandbox), tool_set(), "Fix total.")
        assert sandbox.read("/workspace/price.py") == session.sandbox.read("/workspace/price.py")
    replayed = again.atif()
    for step in [*stored["steps"], *replayed["steps"]]:
        step["extra"].pop("tool_seconds", None)
    assert replayed == stored


def test_atif_keeps_tokens_and_malformed_calls(session):
    odd = Reply("t", (Call("a", "shell", "{oops"),), "hm", 5, 3, "stop", (1, 2), (3, 4, 5), (-0.1, -0.2, -0.3))
    atif = run(ScriptedModel([odd, Reply("done")]), session, tool_set(), "x").atif()
    assert atif["steps"][2]["metrics"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3, 4, 5],
        "logprobs": [-0.1, -0.2, -0.3],
    }
    assert atif["steps"][2]["observation"]["results"][0]["extra"] == {"kind": "invalid"}
    assert replies_of(json.loads(json.dumps(atif))) == [odd, Reply("done")]
    with pytest.raises(ValueError, match="expected ATIF"):
        replies_of({"steps": [{}]})


def test_every_end(session):
    look = calling(("list_dir", {}))
    assert run(ScriptedModel([Reply("hello")]), session, tool_set(), "x").end == "answered"
    assert run(ScriptedModel([look] * 5), session, tool_set(), "x", LoopLimits(turns=3)).end == "turns"
    assert run(ScriptedModel([look] * 5), session, tool_set(), "x", LoopLimits(tokens=20)).end == "tokens"
    assert run(ScriptedModel([look] * 5), session, tool_set(), "x", LoopLimits(seconds=-1)).end == "time"
    assert run(ScriptedModel([look] * 5), session, tool_set(), "x", stopped=lambda: True).end == "stopped"
    failed = run(ScriptedModel([look]), session, tool_set(), "x")
    assert (failed.end, failed.error) == ("model_error", "the script has 1 replies, asked for one more")
    session.sandbox.destroy()
    lost = run(ScriptedModel([look]), session, tool_set(), "x")
    assert lost.end == "sandbox_error"
    assert lost.error.startswith("SandboxLost")


def test_a_cut_reply_goes_on(session):
    model = ScriptedModel([Reply("thinki", finish_reason="length"), Reply("done")])
    assert run(model, session, tool_set(), "x").end == "answered"
    assert model.seen[1][-1] == {"role": "user", "content": CUT}


def test_the_user_can_interrupt(session):
    said = iter([["stop using the shell"], []])
    model = ScriptedModel([calling(("list_dir", {})), Reply("done")])
    run(model, session, tool_set(), "x", inbox=lambda: next(said, []))
    assert {"role": "user", "content": "stop using the shell"} in model.seen[0]


@pytest.mark.parametrize("asked", [True, False])
def test_a_long_run_goes_on_from_its_summary(session, asked):
    first = calling(("summarize", {})) if asked else calling(("list_dir", {}))
    limits = LoopLimits() if asked else LoopLimits(context_tokens=50)
    model = ScriptedModel([first, Reply("I listed files."), Reply("done", prompt_tokens=10)])
    done = run(model, session, tool_set(), "Fix it.", limits)
    assert done.end == "answered"
    assert model.seen[1][-1] == {"role": "user", "content": SUMMARY}
    assert [m["role"] for m in model.seen[2]] == ["system", "user", "user"]
    assert model.seen[2][2]["content"].endswith("I listed files.")
    assert [step.segment for step in done.steps] == [0, 0, 0, 0, 0, 1, 1, 1, 1]


# Servers


@pytest.fixture
def server():
    with serving() as made:
        yield made


def test_a_streamed_reply(server):
    server.answers = [
        stream(
            delta(role="assistant", reasoning_content="hm"),
            delta(content="I "),
            delta(content="look.\ud83d"),
            delta(content="\ude00 \ud83d"),
            delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "read_file", "arguments": '{"pa'}}]),
            delta(tool_calls=[{"index": 0, "function": {"arguments": 'th": "x"}'}}]),
            delta(tool_calls=[{"index": 1, "id": "b", "function": {"name": "list_dir", "arguments": ""}}]),
            delta(finish="tool_calls"),
            {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}},
        )
    ]
    model = ChatServer(server.url, "m", key="k", temperature=0.5)
    reply = model.reply([{"role": "user", "content": "x"}], tool_set().schemas, 100, 10)
    assert (reply.text, reply.thinking, reply.finish_reason) == ("I look.\U0001f600 \ufffd", "hm", "tool_calls")
    assert reply.calls == (Call("a", "read_file", '{"path": "x"}'), Call("b", "list_dir", ""))
    assert (reply.prompt_tokens, reply.completion_tokens) == (7, 9)
    assert server.asked[0]["temperature"] == 0.5
    assert server.asked[0]["tools"][0]["type"] == "function"


def test_a_whole_reply_with_tokens(server):
    body = {
        "choices": [
            {
                "message": {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}],
                },
                "finish_reason": "tool_calls",
                "token_ids": [4, 5],
                "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]},
            }
        ],
        "prompt_token_ids": [1, 2, 3],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    server.answers = [(200, "application/json", json.dumps(body))]
    reply = ChatServer(server.url, "m", stream=False).reply([], [], 10, 10)
    assert reply.calls == (Call("a", "f", '{"x": 1}'),)
    assert (reply.prompt_token_ids, reply.completion_token_ids, reply.logprobs) == ((1, 2, 3), (4, 5), (-0.5, -1.0))


def test_a_server_that_stumbles_is_asked_again(server):
    server.answers = [
        (503, "text/plain", "busy"),
        (200, "text/event-stream", ['data: {"choi']),
        stream(delta(content="hi", finish="stop")),
    ]
    assert ChatServer(server.url, "m").reply([], [], 10, 30).text == "hi"
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, "application/json", '{"error": "no such model"}'), "status 400: .*no such model"),
        ((200, "application/json", "{}"), "a response without choices"),
        (stream({"error": {"message": "out of memory"}}), "out of memory"),
        ((200, "text/event-stream", [*(["data: {}\n\n", 0.1] * 30)]), "ReadTimeout|no reply in"),
    ],
)
def test_a_server_that_fails_is_named(server, answer, message):
    server.answers = [answer] * 3
    with pytest.raises(ModelError, match=message):
        ChatServer(server.url, "m", retries=0).reply([], [], 10, 1.0)


def test_a_server_that_is_gone():
    with pytest.raises(ModelError, match="ConnectError"):
        ChatServer("http://127.0.0.1:9/v1", "m", retries=0).reply([], [], 10, 1.0)
    with pytest.raises(ValueError, match="url: expected http"):
        ChatServer("localhost", "m")


def test_the_loop_over_a_server(server, session):
    server.answers = [
        stream(delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "read_file", "arguments": '{"path": "price.py"}'}}])),
        stream(delta(content="It returns the first price.", finish="stop")),
    ]
    done = run(ChatServer(server.url, "m"), session, tool_set(), "What does total do?")
    assert done.end == "answered"
    assert server.asked[1]["messages"][-1]["content"].startswith("1\tdef total")
