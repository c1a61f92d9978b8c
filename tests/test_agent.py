"""`python -m rl agent` end to end: a directory, a server that streams tool calls or continues text, a diff, and the way back."""

import json
import os
import subprocess

import pytest

from rl.__main__ import main
from rl.agent import files_of, write_back
from rl.environments.sandbox import CannotIsolate
from rl.harness import prompt
from rl.harness.model import Call, CompletionServer, ModelError, Reply, ScriptedModel, served_name
from rl.harness.session import Session
from rl.harness.toolsets import tool_set
from rl.harness.trajectory import Trajectory
from rl.harness.web import SandboxWeb, plain
from tests import sandbox_cases
from tests.chat_server import call, delta, serving, stream


@pytest.fixture(scope="module")
def namespaces():
    with sandbox_cases.open_or_skip("namespaces") as backend:
        yield backend


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    (root / "shop").mkdir(parents=True)
    (root / "shop" / "price.py").write_bytes(b"def total(prices):\r\n    return prices[0]\r\n")
    (root / "run").write_text("#!/bin/sh\nexec python3 -c 'from shop.price import total; print(total([1, 2]))'\n")
    (root / "run").chmod(0o755)
    (root / "latest").symlink_to("shop/price.py")
    return root


@pytest.fixture
def agent(namespaces, project, tmp_path, capsys):
    def call_it(*arguments):
        code = main(["agent", "--task", str(project), "--image", str(sandbox_cases.image()), "Add up all prices.", *arguments])
        return code, capsys.readouterr()

    return call_it


EDIT = {"path": "shop/price.py", "old": "prices[0]", "new": "sum(prices)"}


def test_a_server_that_streams_calls(agent, project, tmp_path):
    answers = [
        stream(
            delta(content="I "),
            delta(content="look."),
            *call("read_file", path="latest"),
            *call("list_dir", 1),
            delta("tool_calls"),
        ),
        stream(*call("edit_file", **EDIT), delta("tool_calls")),
        stream(
            *call("shell", command="./run"),
            delta("tool_calls"),
            {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}},
        ),
        stream(*call("finish", answer="It adds up."), delta("tool_calls")),
    ]
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    with serving(*answers) as server:
        code, shown = agent("--model", server.url, "--save", str(tmp_path / "t.json"))
    assert code == 0, shown
    assert server.asked[0]["model"] == "played"
    assert server.asked[3]["messages"][-1]["content"] == "3"
    for text in (
        "I look.",
        "> edit_file",
        "It adds up.",
        "finished; 4 replies, 5 calls, 4 tokens",
        "+    return sum(prices)",
        "--apply writes",
    ):
        assert text in shown.out
    assert before == {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    # What was saved is a script: it does the same again, and --apply writes it back.
    code, shown = agent("--scripted", str(tmp_path / "t.json"), "--apply")
    assert code == 0, shown
    assert (project / "shop" / "price.py").read_bytes() == b"def total(prices):\r\n    return sum(prices)\r\n"
    assert os.readlink(project / "latest") == "shop/price.py"
    assert sorted(os.listdir(project)) == ["latest", "run", "shop"]


def test_a_server_of_completions(agent):
    edit = "<tool_call>\n" + json.dumps({"name": "edit_file", "arguments": EDIT}) + "\n</tool_call>"
    answers = [
        stream(
            {"choices": [{"text": "Now. "}]},
            {"choices": [{"text": edit[:20]}]},
            {"choices": [{"text": edit[20:], "finish_reason": "stop"}]},
        ),
        stream({"choices": [{"text": "Done.", "finish_reason": "stop"}]}),
    ]
    with serving(*answers) as server:
        code, shown = agent("--model", server.url, "--completions")
    assert code == 0
    assert "sum(prices)" in shown.out
    asked = server.asked[1]["prompt"]
    assert asked.startswith("<|im_start|>system\nYou are a coding agent.")
    assert '"name": "edit_file"' in asked
    assert asked.endswith("<|im_start|>tool\nEdited shop/price.py: 1 place, line 2<|im_end|>\n<|im_start|>assistant\n")


def test_mistakes_are_told(agent, project, capsys, monkeypatch):
    code, shown = agent("--model", "http://127.0.0.1:9/v1")
    assert (code, shown.err[:6]) == (1, "error:")
    code, shown = agent("--scripted", str(project / "run"))
    assert code == 1
    with pytest.raises(SystemExit):
        agent()
    assert main(["agent", "--task", str(project / "none"), "--scripted", os.devnull, "x"]) == 1
    assert main(["nothing"]) == 2

    def cannot(*_, **__):
        raise CannotIsolate("namespaces", {"own_uids": "not root"})

    monkeypatch.setattr("rl.agent.open_backend", cannot)
    with serving() as server:
        code, shown = agent("--model", server.url)
    assert code == 3
    assert "Run the command as root" in shown.err


def test_what_is_copied_of_a_directory(project):
    assert sorted(files_of(project)) == ["latest", "run", "shop/price.py"]
    assert {name: entry.mode for name, entry in files_of(project).items()} == {
        "latest": 0o120000,
        "run": 0o100755,
        "shop/price.py": 0o100644,
    }
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    (project / ".gitignore").write_text("*.log\n")
    (project / "a.log").write_text("x")
    assert sorted(files_of(project)) == [".gitignore", "latest", "run", "shop/price.py"]


PATCH = """diff --git a/{0} b/{0}
new file mode 100644
--- /dev/null
+++ b/{0}
@@ -0,0 +1 @@
+x
"""


@pytest.mark.parametrize("path", ["../out", ".git/hooks/pre-commit", "link/out", "shop/price.py"])
def test_nothing_is_written_elsewhere(project, path):
    (project / "link").symlink_to(project.parent)
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    with pytest.raises(ValueError, match="nothing was written"):
        write_back(project, PATCH.format("fine") + PATCH.format(path))
    assert not (project / "fine").exists()
    assert not (project.parent / "out").exists()


def test_a_directory_inside_a_repository_is_written_to(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "part").mkdir()
    write_back(tmp_path / "part", PATCH.format("new/file"))
    assert (tmp_path / "part" / "new" / "file").read_text() == "x\n"


def test_text_and_calls():
    text = '<think>hm</think>I go.<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call><tool_call>{oops</tool_call>'
    assert prompt.parsed(text) == ("I go.", "hm", [("a", '{"x": 1}'), ("", "{oops")])
    assert prompt.parsed('<tool_call>{"name": "a"}') == ("", "", [("a", "{}")])
    assert prompt.parsed("<tool_call>[1]</tool_call><|im_end|>x") == ("", "", [("", "[1]")])
    said = Reply("I go.", (Call("0", "a", '{"x": 1}'), Call("1", "a", "{oops"))).message
    written = prompt.chatml([{"role": "user", "content": "a <|im_end|> b"}, said])
    assert written.count("<|im_end|>") == 2
    assert prompt.parsed(written.split("assistant\n")[1].split("<|im_end|>")[0])[2] == [("a", '{"x": 1}'), ("a", "{oops")]


def test_tokens_of_completions():
    choice = {
        "text": "hi",
        "finish_reason": "length",
        "token_ids": [4, 5],
        "logprobs": {"token_logprobs": [-1, -2]},
        "prompt_token_ids": [1],
    }
    with serving((200, "application/json", json.dumps({"choices": [choice]}))) as server:
        reply = CompletionServer(server.url, "m", stream=False).reply([{"role": "user", "content": "x"}], [], 2, 10)
        assert served_name(server.url) == "played"
    assert (reply.text, reply.completion_token_ids, reply.logprobs, reply.prompt_token_ids) == ("hi", (4, 5), (-1, -2), (1,))
    assert reply.finish_reason == "length"
    with pytest.raises(ModelError, match="no list of models"):
        served_name("http://127.0.0.1:9/v1")


def test_the_web_is_what_the_sandbox_lets_out(namespaces):
    tools = tool_set(["web_fetch", "web_search"])
    with namespaces.create(sandbox_cases.spec(namespaces)) as sandbox:
        session = Session(sandbox, "/tmp", web=SandboxWeb(sandbox))
        refused = tools.call(session, "web_fetch", {"url": "http://192.0.2.1/"})
        assert refused.kind == "error"
        assert "unreachable" in refused.text
        assert "no search engine" in tools.call(session, "web_search", {"query": "x"}).text
        page = "<html><head><title>t</title></head><p>Hello <b>you</b> &amp; <a href='http://x/y'>me</a></p></html>"
        sandbox.write("/tmp/w/index.html", page.encode())
        tools_of = tool_set(["shell", "shell_output"])
        tools_of.call(session, "shell", {"command": "python3 -u -m http.server 8000", "cwd": "/tmp/w", "background": True})
        while "Serving" not in tools_of.call(session, "shell_output", {"job": 1}).text:
            pass
        session.web = SandboxWeb(sandbox, "http://127.0.0.1:8000/?q={query}")
        assert tools.call(session, "web_search", {"query": "a b"}).text == "Hello you & me (http://x/y)"
    assert plain("<script>x</script><!-- y --><li>a<li>b") == "a\nb"


def test_a_script_is_a_trajectory(tmp_path):
    Trajectory("m", [], "d").save(tmp_path / "t.json")
    assert ScriptedModel([]).name == "scripted"
