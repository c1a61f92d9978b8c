"""Suites, runs, reports: with scripted models in real sandboxes, over a server, and in a browser without a screen."""

import json
import re
from collections import Counter
from dataclasses import asdict, replace

import pytest

from rl.__main__ import main
from rl.environments.images import ImageStore
from rl.environments.sandbox import ExecResult
from rl.evals.command import price_of
from rl.evals.page import page
from rl.evals.runner import Evaluation, Price, Result, Settings, read_results
from rl.evals.suites import TARGETED, Outcome, suite
from rl.evals.summary import differs, pareto, summarize
from rl.evals.targeted import SUITES
from rl.harness.model import Call, Reply, ScriptedModel
from rl.harness.schema import ToolResult
from rl.harness.toolsets import tool_set
from rl.harness.trajectory import Step, Trajectory, dumped
from rl.tasks.task import TaskError, save
from rl.tasks.workspace import Sandboxes
from tests import report_cases, sandbox_cases
from tests.chat_server import call, delta, serving, stream


@pytest.fixture(scope="module")
def sandboxes():
    with sandbox_cases.open_or_skip("namespaces") as backend, Sandboxes(backend, ImageStore(sandbox_cases.IMAGES)) as made:
        yield made


def reply(*calls, text="", tokens=10):
    return Reply(text, tuple(Call(f"c{i}", name, json.dumps(a)) for i, (name, a) in enumerate(calls)), "", 100, tokens)


TYPO = reply(("edit_file", {"path": "stats.py", "old": "maen", "new": "mean"}))
GOOD = {
    "eager/question": [reply(("read_file", {"path": "config.py"})), reply(text="It raises a KeyError: port() looks the key up.")],
    "eager/typo": [TYPO, reply(("finish", {"answer": "Fixed."}))],
    "eager/plan": [reply(text="Choose json or tomllib by the suffix.")],
    "interruption/more": [TYPO, reply(("edit_file", {"path": "other.py", "old": "Otehr", "new": "Other"})), reply(text="Both.")],
    "quality/reuse": [
        reply(("shell", {"command": "printf '\\n\\ndef host(path):\\n    return load(path)[\"host\"]\\n' >> config.py"})),
        reply(text="Done."),
    ],
}
EAGER_EDITOR = [reply(("write_file", {"path": "config.py", "content": "port = 1\n"})), reply(text="I rewrote it.")]


def evaluation(directory, entries, **options):
    options = {"suite": "eager", "model": "m", "passes": 1, "price": Price(1.0, 10.0), **options}
    return Evaluation(directory, Settings(**options), entries, tool_set())


def entries(*names):
    return [entry for name in names for entry in SUITES[name.split("/")[0]] if entry.task.name == name]


def test_targeted_suites_reward_what_they_ask_for(sandboxes, tmp_path):
    results = evaluation(tmp_path, entries(*GOOD)).run(lambda task, n: ScriptedModel(GOOD[task]), sandboxes, parallel=2)
    assert {result.task: (result.score, result.reason) for result in results} == dict.fromkeys(GOOD, (1.0, ""))
    found = {result.task: result for result in results}["eager/question"]
    assert (found.completion_tokens, found.calls, found.replies, found.end) == (20, 1, 2, "answered")
    assert found.cost == pytest.approx((200 * 1 + 20 * 10) / 1e6)
    said = json.loads((tmp_path / "trajectories" / "interruption--more" / "0.json").read_text())["steps"]
    assert [step["source"] for step in said] == ["system", "user", "agent", "user", "agent", "agent"]


def test_targeted_suites_punish_the_opposite(sandboxes, tmp_path):
    names = ("eager/question", "eager/plan")
    results = evaluation(tmp_path, entries(*names)).run(lambda task, n: ScriptedModel(EAGER_EDITOR), sandboxes)
    assert [result.score for result in results] == [0.0, 0.0]
    assert all("nothing is edited" in result.reason for result in results)


def test_suites():
    assert [name for name in TARGETED if len(SUITES[name]) < 3] == []
    names = [entry.task.name for name in TARGETED for entry in SUITES[name]]
    assert Counter(names).most_common(1)[0][1] == 1
    nothing = Outcome("", {}, frozenset(), Trajectory("", [], ""), "", lambda line: ExecResult(1))
    paid = [entry.task.name for name in TARGETED for entry in SUITES[name] if all(c(nothing) for c in entry.rubric.values())]
    assert paid == []  # an agent that does and says nothing


def test_a_run_goes_on_where_it_was_ended(sandboxes, tmp_path):
    two = entries("eager/typo", "eager/plan")
    made = evaluation(tmp_path, two, passes=2)
    broken = made.run(lambda task, n: ScriptedModel(GOOD[task] if n == 0 else []), sandboxes)
    assert [(result.task, result.attempt, result.score) for result in broken] == [
        ("eager/plan", 0, 1.0),
        ("eager/plan", 1, None),
        ("eager/typo", 0, 1.0),
        ("eager/typo", 1, None),
    ]
    assert summarize(tmp_path).errors == 2
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"task": "eager/pl')  # a crash
    again = evaluation(tmp_path, two, passes=2)
    assert [(entry.task.name, n) for entry, n in again.missing()] == [("eager/typo", 1), ("eager/plan", 1)]
    done = again.run(lambda task, n: ScriptedModel(GOOD[task]), sandboxes)
    assert [result.score for result in done] == [1.0] * 4
    assert len(summarize(tmp_path).best) == 2
    with pytest.raises(ValueError, match="expected a run of the same model, passes"):
        evaluation(tmp_path, two, passes=3, model="other")
    with pytest.raises(ValueError, match="same tasks"):
        evaluation(tmp_path, two[:1], passes=2)


def test_results_are_read_whatever_stands_in_them(tmp_path):
    """Line ends of Unicode within a text, halves of characters, a line cut within a character, lines that are no result."""
    fine = Result("a/b", 0, 1.0, "resolved", "x\u2028y\x85z")
    lines = [dumped(asdict(fine)), "3", '{"x": 1}', '{"task": [], "attempt": 0, "score": 1, "status": ""}', "[" * 100_000]
    lines += [dumped(asdict(replace(fine, attempt=1, reason="\ud83d")))]
    data = "\n".join(lines).encode() + b"\n" + dumped(asdict(replace(fine, attempt=2, reason="é"))).encode().split(b"\xa9")[0]
    (tmp_path / "results.jsonl").write_bytes(data)
    assert read_results(tmp_path) == [fine, replace(fine, attempt=1, reason="\ud83d")]


@pytest.mark.parametrize(
    "option", ["--limit=0", "--limit=-1", "--passes=0", "--turns=0", "--reply-tokens=0", "--context-tokens=-1", "--temperature=nan"]
)
def test_options_that_cannot_be(tmp_path, capsys, option):
    out = ["--name", "m", "--out", str(tmp_path / "run"), "--directory", str(tmp_path)]
    assert main(["eval", "--model", "http://127.0.0.1:9", "--suite", "eager", *out, option]) == 1
    assert f"error: {option.split('=')[0]} must be " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_tasks_of_one_name_are_refused(tmp_path):
    (entry,) = entries("eager/plan")
    for name in ("eager/plan", "a--b/c"):
        other = replace(entry, task=replace(entry.task, name=name))
        with pytest.raises(ValueError, match="expected different names, got"):
            evaluation(tmp_path, [entry, other, replace(entry, task=replace(entry.task, name="a/b--c"))])
    assert not list(tmp_path.iterdir())


def test_a_report_of_what_is_damaged_or_odd(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    name = "[/red]<script>alert(1)</script>"
    pins = {"model": name, "version": "", "suite": name, "tasks": {"a/b": "1"}}
    run = tmp_path / "run"
    (run / "trajectories/a--b").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(pins))
    results = [Result("a/b", 0, 1.0, "resolved", name + "\ud83d"), Result("a/b", 1, 1.0, "resolved")]
    (run / "results.jsonl").write_text("".join(dumped(asdict(result)) + "\n" for result in results))
    deep = '{"a": ' + "[" * 940 + "]" * 940 + "}"
    said = Reply(name + "\ud83d", (Call("0", name, "[" * 100_000), Call("1", name, deep)))
    Trajectory(name, [], "d", [Step("agent", said, (ToolResult(name), ToolResult(name)))]).save(run / "trajectories/a--b/0.json")
    (run / "trajectories/a--b/1.json").write_text('{"steps": [')
    assert main(["eval", "report", str(run), "--out", str(tmp_path / "report.html")]) == 0
    assert "[/red]" in capsys.readouterr().out
    html = (tmp_path / "report.html").read_text("utf-8")
    assert html.count("<script") == 1
    assert "1.json is damaged: JSONDecodeError" in html
    (run / "run.json").write_text(json.dumps(pins | {"tasks": 3}))
    assert main(["eval", "report", str(run), str(run)]) == 1
    assert "expected the directory of a run" in capsys.readouterr().err


@pytest.mark.parametrize("prices", ["[]", '{"m": [1]}', '{"m": ["1", 2]}', '{"m": [NaN, 1]}', '{"m": [-1, 1]}', '{"m": 3}', "{}"])
def test_prices_that_are_none(tmp_path, prices):
    (tmp_path / "prices.json").write_text(prices)
    with pytest.raises(ValueError, match=r"expected .*, got"):
        price_of(tmp_path / "prices.json", "m")


def test_the_command(sandboxes, tmp_path, capsys):
    for entry in entries("eager/typo", "eager/plan"):
        save(entry.task, tmp_path / "tasks" / entry.task.name)
    assert len(suite(str(tmp_path / "tasks"), sandboxes, tmp_path)) == 2
    edit = stream(*call("edit_file", path="stats.py", old="maen", new="mean"), delta("tool_calls"))
    end = stream(delta(content="Fixed."), delta("stop"), {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
    (tmp_path / "prices.json").write_text('{"played": [1, 2]}')
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "images").symlink_to(sandbox_cases.IMAGES)
    base = ["eval", "--suite", "eager", "--limit", "2", "--parallel", "1", "--directory", str(tmp_path / "kept")]
    with serving(end, edit, end) as server:
        code = main(
            [*base, "--model", server.url, "--out", str(tmp_path / "run"), "--prices", str(tmp_path / "prices.json"), "--seed", "3"]
        )
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert server.asked[0]["seed"] == 3
    assert [result.score for result in read_results(tmp_path / "run")] == [0.5, 1.0]
    assert "75.0" in shown
    assert (tmp_path / "run" / "report.html").stat().st_size > 5000
    assert main(["eval", "report", str(tmp_path / "run"), str(tmp_path / "run"), "--out", str(tmp_path / "two.html")]) == 0
    assert "not significant" in " ".join(capsys.readouterr().out.split())
    assert main(["eval", "report", str(tmp_path)]) == 1
    assert main(["eval", "--model", "http://127.0.0.1:9", "--suite", "eager"]) == 1
    with pytest.raises(TaskError, match="expected bench, tiny"):
        suite("nothing", sandboxes, tmp_path)


def test_the_page_in_a_browser(tmp_path):
    first, second = report_cases.two_runs(tmp_path / "runs")
    assert differs(first, second).significant
    text = page([first, second])
    assert "small &lt;i&gt;" in text
    assert "<script>b" not in text
    assert not re.findall(r"(?:src|href)=\"(?!#)", text)  # nothing is loaded from elsewhere
    found = report_cases.clicked(tmp_path)
    if found is None:
        pytest.skip("there is no browser here")
    assert found == {"points": 4, "plots": True, "wide": False, "reached": True, "hidden": True, "diff": True, "transcript": True}


def test_the_front():
    assert pareto([(1, 0.5), (2, 0.4), (3, 0.9), (3, 0.8), (0.5, 0.5)]) == [4, 2]
    assert pareto([]) == []
