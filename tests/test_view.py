"""The page of rollouts: what is told of a run's files, nothing of a rollout read as HTML, and the page in a real browser."""

import contextlib
import http.client
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rl.__main__ import main
from rl.config import RunConfig
from rl.heldout import Evaluation
from rl.rewards import Reward
from rl.rollout import Rollout, place, write_batch
from rl.segments import Segment
from rl.view import index
from rl.view.server import HERE, Server, Viewer
from rl.weights import Publisher, Store
from tests import browser
from tests.rl_cases import make_base, make_loop, task_of
from training.base import find_base, read_model
from training.data.tokenizer import OWN, Vocabulary, load_vocabulary, train_tokenizer

EVIL = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random model with a tokenizer of bytes."""
    directory = tmp_path_factory.mktemp("base")
    checkpoint = make_base(directory, vocab_size=320)
    Vocabulary(train_tokenizer(["def f(x):\n    return x\n"] * 20, 320, OWN.special), OWN).save(directory)
    return checkpoint


def ids_of(base: Path, text: str) -> list[int]:
    return load_vocabulary(base.parents[1]).encode(text)


def segment(ids: list[int], own: int, version: int) -> Segment:
    """Its last `own` tokens are the model's."""
    rest = len(ids) - own
    experts = np.arange(len(ids) * 4, dtype=np.int16).reshape(len(ids), 2, 2) % 4
    experts[-1] = -1
    return Segment(ids, [False] * rest + [True] * own, [0.0] * rest + [-0.5 * (i + 1) for i in range(own)],
                   [-1] * rest + [version + i // 2 for i in range(own)], experts)  # fmt: skip


def rollout(base: Path, group: int, sample: int, reward: float | None, **changes) -> Rollout:
    call = {"tool_call_id": "a", "function_name": "run_check", "arguments": {"path": EVIL}}
    result = {"source_call_id": "a", "content": f"out: {EVIL}", "extra": {"kind": "ok"}}
    steps = [
        {"source": "user", "message": f"Fix it. {EVIL}", "extra": {"segment": 0}},
        {"source": "agent", "message": "", "tool_calls": [call], "observation": {"results": [result]}, "extra": {"segment": 0}},
        {"source": "agent", "message": "done", "extra": {"segment": 1}},
    ]
    first = ids_of(base, "def f(x):\n    return x <b>\n")
    segments = [segment(first, 4, group), segment([*first[:5], *ids_of(base, "another way")], 3, group + 1)]
    parts = {"solved": reward or 0.0, "effort": -0.0}
    earned = Reward({}, valid=False, error="no sandbox") if reward is None else Reward(parts)
    status = "failed" if not reward else "resolved"
    values = dict(segments=segments, solved=reward, status=status, trajectory={"steps": steps, "extra": {"end": "finished"}})
    patch = f"diff --git a/x b/x\n--- a/x\n+++ b/x\n-old\n+new {EVIL}\n"
    where = {"sample": sample, "group": group, "attempt": 1, "worker": "w"}
    return Rollout(
        **{"prompt": f"tiny/{group} {EVIL}", "reward": earned, "patch": patch, "seconds": 1.5, "where": where} | values | changes
    )


REWARDS = {
    0: [0.0, 1.0, 0.5],
    1: [1.0, None, 1.0],
    2: [0.25, 0.5],
}  # of the samples of each group; step 0 trains 0, step 1 trains 1


def write_run(run: Path, base: Path) -> Path:
    names = {}
    for group, rewards in REWARDS.items():
        for i, reward in enumerate(rewards):
            path = place(run, group, 10 * group + i)
            rollout(base, group, 10 * group + i, reward).save(path)
            names.setdefault(group, []).append(str(path.relative_to(run)))
    write_batch(run, 0, [names[0]])
    write_batch(run, 1, [names[1]])
    Evaluation("before", 0, [task_of(0, 0), task_of(1, 0)], 2, [[0.0, 1.0], [0.0, 0.0]], 10, 1).save(run / "evaluations")
    config = RunConfig(run_dir=str(run), base=str(base), trackers="")
    (run / "config.json").write_text(json.dumps(asdict(config)))
    lines = [
        {"step": 1, "reward": 0.5, "loss": None},
        {"step": 2, "reward": 1.0, "loss": 0.1, "heldout/mean": 0.25, "alarms": "a <b>"},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def run(tmp_path, base):
    return write_run(tmp_path / "run", base)


@contextlib.contextmanager
def serving(run: Path, **files: str):
    """files: further scripts of the page, by name."""
    with Server(Viewer(run)) as server:
        for name, script in files.items():
            server.files[f"/{name}.js"] = f"{name}.js", script.encode()
            html = server.files["/"][1].replace(b"</body>", f'<script type="module" src="/{name}.js"></script></body>'.encode())
            server.files["/"] = "page.html", html
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: Server, path: str, headers: dict | None = None) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    connection.request("GET", path, headers=headers or {})
    response = connection.getresponse()
    found = response.status, response.headers["Content-Type"], response.read()
    connection.close()
    return found


def test_groups_and_their_rollouts(run):
    viewer = Viewer(run)
    found = viewer.answer("groups")
    rows = {row["group"]: row for row in found["rows"]}
    assert (found["left"], found["damaged"], list(rows)) == (0, [], [2, 1, 0])
    first, second, third = (rows[i] for i in range(3))
    assert (first["step"], first["solved"], first["best"], first["reward"], first["samples"]) == (1, 0.5, 1.0, 0.5, 3)
    assert (first["oldest"], first["newest"], first["tokens"], first["statuses"]) == (0, 2, 21, {"failed": 1, "resolved": 2})
    assert (second["step"], second["solved"], second["best"], second["statuses"]) == (2, 1.0, 1.0, {"resolved": 2, "failed": 1})
    assert third["step"] is None
    advantages = {i: [r["advantage"] for r in viewer.answer("group", i)["rollouts"]] for i in range(3)}
    assert advantages == {0: [-0.5, 0.5, 0.0], 1: [0.0, None, 0.0], 2: [-0.125, 0.125]}
    (facts,) = [r for r in viewer.answer("group", 1)["rollouts"] if r["sample"] == 11]
    assert (facts["reward"], facts["error"], facts["segments"], facts["calls"], facts["changed"]) == (None, "no sandbox", 2, 1, 2)


def test_advantages_are_the_step_s(run):
    """Of the samples that the batch takes, also where another is there; standardized where the run does that."""
    write_batch(run, 0, [["rollouts/000000/00000000.safetensors", "rollouts/000000/00000001.safetensors"]])
    (run / "config.json").write_text(json.dumps({"standardize": True}))
    found = [row["advantage"] for row in Viewer(run).answer("group", 0)["rollouts"]]
    assert found[:2] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert found[2] is None


def test_what_stands_above(run):
    found = Viewer(run).answer("run")
    assert found["curves"] == {"reward": [(1, 0.5), (2, 1.0)], "loss": [(1, None), (2, 0.1)], "heldout/mean": [(2, 0.25)]}
    assert found["alarms"] == "a <b>"
    (before,) = found["evaluations"]
    assert (before["name"], before["mean"], before["best"], before["parsed"]) == ("before", 0.25, 0.5, 0.9)
    assert (found["config"]["group_size"], found["state"], found["damaged"]) == (8, None, [])


def test_a_rollout_s_tokens(run, base):
    found = Viewer(run).answer("rollout", 0, 1)
    first, second = found["segments"]
    assert "".join(first["texts"]) == "def f(x):\n    return x <b>\n"
    assert (first["ids"], first["mask"][-4:], first["mask"][0]) == (
        ids_of(base, "def f(x):\n    return x <b>\n"),
        [True] * 4,
        False,
    )
    assert (first["log_probs"][-4:], first["versions"][-4:]) == ([-0.5, -1.0, -1.5, -2.0], [0, 0, 1, 1])
    assert (first["shared"], second["shared"]) == (0, 5)
    assert (found["advantage"], found["largest_advantage"], found["reward"]["total"], found["neighbours"]) == (
        0.5,
        0.5,
        1.0,
        [0, 2],
    )
    experts = Viewer(run).answer("experts", 0, 1, 1)
    assert (experts[0][:2], experts[0][-1]) == ([[2, 3], [2, 3]], [-1, -1])
    with pytest.raises(ValueError, match="one of the 2 that were recorded, got 2"):
        Viewer(run).answer("experts", 0, 1, 2)


def test_without_a_tokenizer_ids_are_shown(run):
    (run / "config.json").write_text(json.dumps(asdict(RunConfig(base=str(run / "gone")))))
    found = Viewer(run).answer("rollout", 0, 1)
    assert found["segments"][0]["texts"] is None
    assert "gone" in found["note"]
    (run / "config.json").write_text("{}")
    assert "--base" in Viewer(run).answer("rollout", 0, 1)["note"]
    with pytest.raises(FileNotFoundError, match="--base"):
        Viewer(run).answer("gaps", 0, 1)


def test_gaps_are_zero_where_the_sampler_had_the_learner_s_weights(monkeypatch, tmp_path):
    """In synchronous mode a step trains what its own weights sampled; the next version's say something else."""
    base, run = make_base(tmp_path / "base"), tmp_path / "run"
    options = dict(steps=2, max_staleness=0, deterministic=True, lr=1e-2, save_every=1)
    with make_loop(monkeypatch, run, base, **options) as loop:
        assert loop.run()
    (run / "config.json").write_text(json.dumps(asdict(loop.config) | {"base": str(base)}))
    viewer = Viewer(run)
    for group, step in ((0, 0), (2, 1), (1, 0)):  # back to an older version, too
        sample = viewer.answer("group", group)["rollouts"][0]["sample"]
        found = viewer.answer("gaps", group, sample)
        gaps = [gap for row in found["gaps"] for gap in row if gap is not None]
        own = [m for row in viewer.answer("rollout", group, sample)["segments"] for m in row["mask"]]
        assert (found["version"], found["source"], len(gaps), set(gaps)) == (step, "weights", sum(own), {0.0})
    (run / "batches" / "00000000.json").unlink()  # not trained yet: by the newest
    newest = viewer.answer("gaps", 0, 0)
    assert (newest["version"], newest["wanted"]) == (2, None)
    assert any(gap for row in newest["gaps"] for gap in row)
    shutil.rmtree(run / "weights")
    found = Viewer(run).answer("gaps", 0, 0)
    assert (found["source"], found["version"], found["gaps"]) == ("checkpoints", 2, newest["gaps"])
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(FileNotFoundError, match="neither versions nor checkpoints"):
        Viewer(run).answer("gaps", 0, 0)


def test_damaged_files_are_named_and_the_rest_is_shown(run):
    whole = place(run, 0, 0).read_bytes()
    place(run, 0, 0).write_bytes(whole[: len(whole) // 2])
    place(run, 0, 2).write_bytes(b"")
    for sample, rest in ((20, "{"), (21, "[]")):
        save_file({"0.mask": torch.ones(1)}, place(run, 2, sample), {"rollout": rest})
    (run / "batches" / "00000001.json").write_text('[["rollouts/../../etc/passwd"]]')
    (run / "batches" / "00000007.json").write_text("[1, 2")
    (run / "evaluations" / "after.json").write_text('{"mean": 1}')
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'garbage\n[1]\n\xff\xfe\n{"step": 1e999}\n{"step": 3, "rew')  # the last line is being written
    (run / "state.json").write_text("{}")
    viewer = Viewer(run)
    found, above = viewer.answer("groups"), viewer.answer("run")
    assert sorted(each["file"] for each in found["damaged"]) == [
        "batches/00000001.json", "batches/00000007.json", *(f"rollouts/00000{n}.safetensors" for n in (
            "0/00000000", "0/00000002", "2/00000020", "2/00000021")),
    ]  # fmt: skip
    assert [each["file"] for each in above["damaged"]] == ["state.json", "evaluations/after.json", *["metrics.jsonl"] * 4]
    assert [each["reason"] for each in above["damaged"][2:]] == [f"line {i} is no record" for i in (3, 4, 5, 6)]
    rows = {row["group"]: row for row in found["rows"]}
    assert (rows[0]["samples"], rows[0]["damaged"], rows[0]["best"], rows[2]["solved"], rows[1]["step"]) == (3, 2, 1.0, None, None)
    assert viewer.answer("rollout", 0, 1)["damaged"] == 2
    for sample in (0, 2):
        with pytest.raises(ValueError, match="is no rollout"):
            viewer.answer("rollout", 0, sample)
    assert "reason" in viewer.answer("group", 2)["rollouts"][0]


def test_a_run_that_goes_on_is_read_again_where_it_changed(run, base, monkeypatch):
    read = []

    def reading(path):
        read.append(path.name)
        return real(path)

    real = index.read_facts
    monkeypatch.setattr(index, "read_facts", reading)
    viewer = Viewer(run)
    viewer.answer("groups")
    assert len(read) == 8
    viewer.answer("groups")
    assert len(read) == 8  # known
    rollout(base, 2, 22, 1.0).save(place(run, 2, 22))
    rollout(base, 2, 20, 0.0).save(place(run, 2, 20))  # done again
    place(run, 3, 30).parent.mkdir()
    place(run, 3, 30).with_suffix(".part").write_bytes(b"half")
    write_batch(run, 2, [[f"rollouts/000002/000000{i}.safetensors" for i in (20, 21, 22)]])
    rows = {row["group"]: row for row in viewer.answer("groups")["rows"]}
    assert sorted(read[8:]) == ["00000020.safetensors", "00000022.safetensors"]
    assert (rows[2]["step"], rows[2]["samples"], rows[2]["solved"], 3 in rows) == (3, 3, 0.5, False)
    shutil.rmtree(run / "rollouts")
    assert viewer.answer("groups")["rows"] == []


def test_many_files_are_read_some_at_a_time(run):
    found = Viewer(run).index.groups(budget_s=-1.0)
    assert (found["rows"], found["left"]) == ([], 8)
    viewer = Viewer(run)
    viewer.answer("group", 1)
    found = viewer.index.groups(budget_s=-1.0)
    assert ([row["group"] for row in found["rows"]], found["left"]) == ([1], 5)
    assert viewer.index.groups()["left"] == 0


def test_nothing_of_a_rollout_is_html(run):
    with serving(run) as server:
        for path in ("/api/run", "/api/groups", "/api/group/0", "/api/rollout/0/1"):
            status, kind, data = ask(server, path)
            assert (status, kind) == (200, "application/json; charset=utf-8")
            assert b"<" not in data
        assert EVIL in json.loads(data)["trajectory"]["steps"][1]["observation"]["results"][0]["content"]
        _, kind, page = ask(server, "/")
        assert (kind, page.count(b"<script")) == ("text/html; charset=utf-8", 1)
    for script in HERE.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|srcdoc", script.read_text())
    assert not [
        f for f in HERE.iterdir() if f.suffix in (".html", ".css", ".js") and re.search(r"https?://(?!www.w3.org)", f.read_text())
    ]


MISSING = (
    *("/api", "/api/", "/api/nothing", "/api/group", "/api/group/9", "/api/rollout/0", "/api/rollout/0/9", "/api/rollout/0/../1"),
    *("/api/group/-1", "/api/group/%D9%A3", "/api/group/" + "9" * 400, "/etc/passwd", "/../view/command.py"),
)


def test_what_is_not_there(run):
    with serving(run) as server:
        for path in MISSING:
            status, kind, data = ask(server, path)
            assert (status, kind) == (404, "application/json; charset=utf-8"), path
            assert json.loads(data)["error"]
        place(run, 0, 1).write_bytes(b"x")
        assert ask(server, "/api/rollout/0/1")[0] == 422
        assert ask(server, "/api/run", {"Host": "elsewhere.test"})[0] == 403
        assert ask(server, "/api/run", {"Host": f"localhost:{server.server_address[1]}"})[0] == 200


def test_numbers_that_are_not_finite_travel_as_words(run, base):
    odd = rollout(base, 4, 40, 1.0)
    odd.segments[0].log_probs[-1] = math.nan
    odd.segments[0].log_probs[-2] = -math.inf
    odd.reward = Reward({"solved": math.inf})
    odd.save(place(run, 4, 40))
    with serving(run) as server:
        found = json.loads(ask(server, "/api/rollout/4/40")[2])
    assert found["segments"][0]["log_probs"][-2:] == ["-inf", "nan"]
    assert (found["reward"]["total"], found["advantage"]) == ("inf", None)


def test_the_command(run, tmp_path, capsys):
    for unknown in (tmp_path / "nothing", tmp_path):
        with pytest.raises(SystemExit) as ended:
            main(["view", str(unknown)])
        assert (ended.value.code, f"{unknown} is no run" in capsys.readouterr().err) == (2, True)
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-m", "rl", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stdout.readline()
            address = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
            assert address, line
            taken = subprocess.run([*command[:-1], address[1]], capture_output=True, text=True, env=environment, timeout=120)
            assert (taken.returncode, "in use" in taken.stderr) == (2, True), taken.stderr
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


CLICKS = """
const found = {}, errors = [];
addEventListener("error", e => errors.push(e.message));
addEventListener("securitypolicyviolation", e => errors.push(e.violatedDirective));
const pause = () => new Promise(done => setTimeout(done, 20));
const until = async ask => { for (let i = 0; i < 300; i++) { const e = ask(); if (e) return e; await pause(); } };
const one = (selector, text) => () => [...document.querySelectorAll(selector)].find(e => !text || e.textContent === text);
const colours = () => [...document.querySelectorAll(".tokens span")].map(e => getComputedStyle(e).backgroundColor);
const none = "rgba(0, 0, 0, 0)";
await until(one("#groups tbody tr"));
found.groups = document.querySelectorAll("#groups tbody tr").length;
found.curves = document.querySelectorAll("polyline").length;
found.evaluations = document.querySelectorAll("#evaluations tbody tr").length;
const firsts = () => [...document.querySelectorAll("#groups tbody tr")].map(row => row.firstChild.textContent).join();
found.order = [firsts()];
for (const key of ["best", "best", "prompt"]) { one(`#groups th[data-key=${key}]`)().click(); found.order.push(firsts()); }
const filter = document.querySelector("#filter");
filter.value = "tiny/0"; filter.dispatchEvent(new Event("input"));
found.filtered = firsts();
one("#groups a", "0")().click();
(await until(one("#rollouts a", "1"))).click();
await until(one("#tokens .own"));
found.address = location.hash;
found.texts = [...document.querySelectorAll(".tokens")].map(e => e.textContent);
found.segments = [...document.querySelectorAll("#tokens h3")].map(e => e.textContent);
const own = [...document.querySelectorAll(".tokens span")].map(e => e.classList.contains("own"));
const seen = {};
for (const quantity of ["advantage", "log_prob", "version", "expert", "mask", "gap"]) {
  one(`[data-quantity=${quantity}]`)().click();
  await until(() => document.querySelector("#legend").textContent !== "...");
  seen[quantity] = colours();
}
found.kinds = Object.fromEntries(Object.entries(seen).map(([name, all]) => [name, new Set(all.filter((_, i) => own[i])).size]));
found.different = new Set(Object.values(seen).map(String)).size;
found.masked = ["advantage", "log_prob", "version", "gap", "mask"].every(name => seen[name].every((c, i) => own[i] || c === none));
found.experts = seen.expert.filter(c => c !== none).length;
found.legend = document.querySelector("#legend").textContent;
const last = [...document.querySelectorAll(".tokens .own")][3];
last.dispatchEvent(new MouseEvent("mouseenter"));
found.about = document.querySelector(".about").textContent;
found.output = document.querySelector("pre.output").textContent;
found.patch = [...document.querySelectorAll("#patch .add")].map(e => e.textContent).pop();
found.injected = document.querySelectorAll("main script, main img").length;
found.taken = document.title === "taken";
found.wide = document.documentElement.scrollWidth > innerWidth;
found.errors = errors;
document.title = JSON.stringify(found);
"""


def test_the_page_in_a_browser(run, base, tmp_path):
    model = read_model(find_base(base))
    publisher = Publisher(Store(run / "weights"))
    publisher.publish({name: p.data for name, p in model.named_parameters()}, 0).result()
    publisher.close()
    with serving(run, clicks=CLICKS) as server:
        found = browser.seen(server.url, tmp_path, budget_ms=20_000)
    if found is None:
        pytest.skip("there is no browser here")
    about, legend = found.pop("about"), found.pop("legend")
    assert about.startswith("token ")
    assert "log-prob -2 · version 1 · advantage 0.5" in about
    assert legend.startswith("learner (version 0) less sampler, as in its step; full colour at ±")
    assert "· gap " in about
    assert found == {
        "groups": 3,
        "curves": 3,
        "evaluations": 1,
        "order": ["2,1,0", "1,0,2", "2,1,0", "2,1,0"],
        "filtered": "0",
        "address": "#/rollout/0/1",
        "texts": ["def f(x):↵\n    return x <b>↵\n", "def f(x):another way"],
        "segments": found["segments"],
        "kinds": {
            "advantage": 1,
            "log_prob": 4,
            "version": 3,
            "expert": found["kinds"]["expert"],
            "mask": 1,
            "gap": found["kinds"]["gap"],
        },
        "different": 6,
        "masked": True,
        "experts": found["experts"],
        "output": f"out: {EVIL}",
        "patch": f"+new {EVIL}",
        "injected": 0,
        "taken": False,
        "wide": False,
        "errors": [],
    }
    assert min(found["kinds"]["expert"], found["kinds"]["gap"]) > 1
    assert found["segments"][1].endswith("its first 5 tokens are those of the segment before")
