"""The task format and the importers: round trips, foreign directories written by hand, and every error by name."""

import json
import math
import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.tasks import importers
from rl.tasks.logs import PARSERS
from rl.tasks.task import KINDS, Environment, Provenance, Task, TaskError, Verifier, load, megabytes, save

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1).filter(lambda text: text.strip() != "")
NAMES = st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=4, unique=True)
SECONDS = st.floats(0.1, 1e6)


@st.composite
def tasks(draw):
    names = draw(NAMES)
    split = draw(st.integers(1, len(names)))
    network = draw(st.sampled_from(["no-network", "allowlist", "public"]))
    return Task(
        name=draw(st.from_regex(r"[a-z0-9.-]{1,8}/[A-Za-z0-9_.+-]{1,8}", fullmatch=True)),
        instruction=draw(TEXT),
        environment=Environment(
            image=draw(st.none() | st.just("debian:12")),
            workdir="/w",
            cpus=draw(st.none() | st.floats(0.1, 64)),
            memory_mb=draw(st.none() | st.integers(1, 10**6)),
            network=network,
            allowed_hosts=("pypi.org",) if network == "allowlist" else (),
            env=draw(st.dictionaries(st.from_regex(r"[A-Z]{1,5}", fullmatch=True), TEXT, max_size=2)),
        ),
        verifier=Verifier(
            parser=draw(st.sampled_from(sorted(PARSERS))),
            report=draw(st.none() | st.just("/logs/x.xml")),
            fail_to_pass=tuple(names[:split]),
            pass_to_pass=tuple(names[split:]),
            fail_only=draw(st.booleans()),
            timeout_sec=draw(SECONDS),
        ),
        provenance=Provenance("a 1 -> 2", "MIT", kind=draw(st.sampled_from(KINDS)), difficulty=draw(st.none() | st.floats(0, 1))),
        agent_timeout_sec=draw(SECONDS),
        files=draw(
            st.dictionaries(st.sampled_from(["tests/test.sh", "solution/solve.sh", "environment/a/b"]), st.binary(max_size=9))
        ),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(task=tasks(), other=tasks())
def test_a_saved_task_loads_as_it_was(tmp_path, task, other):
    save(other, tmp_path / "task")  # what an older task left behind must not stay
    save(task, tmp_path / "task")
    assert load(tmp_path / "task") == task
    assert load(tmp_path / "task").digest == task.digest
    assert (task.digest == other.digest) == (task == other)


HARBOR = """
version = "1.0"
[metadata]
author_name = "x"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 90
[environment]
memory = "2G"
storage = "10G"
cpus = 2
allow_internet = false
"""


def directory(root, files):
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def test_harbors_older_schema(tmp_path):
    task = load(directory(tmp_path / "fix-it", {"task.toml": HARBOR, "instruction.md": "Fix it.", "tests/test.sh": "true"}))
    assert (task.name, task.instruction, task.agent_timeout_sec, task.verifier.timeout_sec) == ("local/fix-it", "Fix it.", 120, 90)
    e = task.environment
    assert (e.memory_mb, e.storage_mb, e.cpus, e.network) == (2048, 10240, 2, "no-network")
    assert task.verifier.fail_to_pass == ()
    assert task.files == {"tests/test.sh": b"true"}


def test_harbors_default_network_is_public(tmp_path):
    assert load(directory(tmp_path, {"task.toml": "", "instruction.md": "x"})).environment.network == "public"


@pytest.mark.parametrize(("size", "expected"), [(512, 512), ("512M", 512), ("2G", 2048), ("1.5GiB", 1536), ("2048K", 2), ("1K", 1)])
def test_sizes(size, expected):
    assert megabytes(size) == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"instruction.md": "x"}, "task.toml: expected a file, found none"),
        ({"task.toml": ""}, "instruction.md: expected a file, found none"),
        ({"task.toml": "a = ", "instruction.md": "x"}, "task.toml: expected TOML"),
        ({"task.toml": "", "instruction.md": b"\xff"}, "instruction.md: expected UTF-8"),
        ({"task.toml": "", "instruction.md": "x", "tests/f2p.json": "[]"}, "f2p.json: expected at least one test, got none"),
        ({"task.toml": "", "instruction.md": "x", "tests/p2p.json": '["a"]'}, "f2p.json: expected at least one test, got none"),
        ({"task.toml": "", "instruction.md": "x", "tests/f2p.json": "[" * 100_000}, "f2p.json: expected JSON"),
        ({"task.toml": "[environment]\nenv = {A = 1}", "instruction.md": "x"}, "environment.env: expected texts"),
        ({"task.toml": '[environment]\nallowed_hosts = "a.b"', "instruction.md": "x"}, "allowed_hosts: expected a list, got 'a.b'"),
        ({"task.toml": '[metadata.mxmoe.grading]\nfail_only = "no"', "instruction.md": "x"}, "fail_only: expected true or false"),
        ({"task.toml": b"a = '\xff'", "instruction.md": "x"}, "task.toml: expected TOML in UTF-8"),
        ({"task.toml": "", "instruction.md": " \n"}, "instruction: expected a text"),
        ({"task.toml": "[[steps]]\nname='a'", "instruction.md": "x"}, "steps: expected one step"),
        ({"task.toml": "[environment]\ngpus = 1", "instruction.md": "x"}, "environment.gpus: expected none, got 1"),
        ({"task.toml": "[environment]\nmemory = 'lots'", "instruction.md": "x"}, "expected a size such as"),
        ({"task.toml": "[environment]\ncpus = -1", "instruction.md": "x"}, "cpus: expected a positive number, got -1"),
        ({"task.toml": "[environment]\nnetwork_mode = 'x'", "instruction.md": "x"}, "network: expected no-network or"),
        ({"task.toml": "environment = 3", "instruction.md": "x"}, "AttributeError"),
        ({"task.toml": "[metadata.mxmoe]\nsize = 3", "instruction.md": "x"}, "unexpected keyword argument 'size'"),
        ({"task.toml": "[metadata.mxmoe.grading]\nparser = 'nose'", "instruction.md": "x"}, "parser: expected one of"),
        (
            {"task.toml": "[agent]\ntimeout_sec = nan", "instruction.md": "x"},
            "agent timeout_sec: expected a positive number, got nan",
        ),
        ({"task.toml": "", "instruction.md": "x", "tests/f2p.json": "{}"}, "f2p.json: expected a list of test names, got dict"),
        ({"task.toml": "", "instruction.md": "x", "tests/f2p.json": "["}, "f2p.json: expected JSON"),
        ({"task.toml": "", "instruction.md": "x", "tests/f2p.json": '["a"]', "tests/p2p.json": '["a"]'}, "no test of fail_to_pass"),
    ],
)
def test_bad_directories_are_named(tmp_path, files, message):
    with pytest.raises(TaskError, match=message):
        load(directory(tmp_path, files))


def test_links_out_of_a_task_are_refused(tmp_path):
    root = directory(tmp_path / "task", {"task.toml": "", "instruction.md": "x", "tests/test.sh": "true"})
    (tmp_path / "secret").write_text("s")
    (root / "tests" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(TaskError, match="expected a file inside the task"):
        load(root)
    foreign = directory(tmp_path / "foreign", TERMINAL_BENCH)
    (foreign / "tests/secret").symlink_to("/etc/hosts")
    with pytest.raises(TaskError, match="expected a file inside the task"):
        importers.terminal_bench(foreign)


PATCH = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1,2 @@\n-a\n+b\n+c\n"
ROW = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "0" * 40,
    "problem_statement": "It breaks.",
    "patch": PATCH,
    "test_patch": PATCH,
    "FAIL_TO_PASS": '["t.py::a"]',
    "PASS_TO_PASS": ["t.py::b", "t.py::b"],
}


def test_swebench_rows():
    task = importers.swebench_row(
        ROW | {"eval_script": "run", "log_parser": "parse_log_cargo", "eval_type": "fail_only", "image": "i"}
    )
    v = task.verifier
    assert (v.parser, v.report, v.fail_only, v.fail_to_pass, v.pass_to_pass) == ("cargo", None, True, ("t.py::a",), ("t.py::b",))
    assert (task.environment.image, task.instruction, task.name) == ("i", "It breaks.", "swe-bench/a__b-1")
    assert (task.provenance.changed_files, task.provenance.changed_lines) == (1, 3)
    assert task.files["tests/test.sh"] == b"run"
    assert task.files["solution/gold.patch"] == PATCH.encode()


def test_rows_of_its_successors():
    task = importers.swebench_row(ROW | {"install_config": {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest"}})
    assert b"pytest -rA" in task.files["tests/test.sh"]
    assert task.verifier.parser == "pytest"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"patch": None}, "missing patch"),
        ({"FAIL_TO_PASS": "t.py::a"}, "a__b-1: FAIL_TO_PASS: expected a list of test names or its JSON"),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS: expected a list of test names"),
        ({"FAIL_TO_PASS": "[" * 100_000}, "FAIL_TO_PASS: expected a list of test names"),
        ({"FAIL_TO_PASS": []}, "a__b-1: FAIL_TO_PASS: expected at least one test, got none"),
        ({"patch": math.nan}, "missing patch"),
        ({"test_patch": b"x"}, "a__b-1: test_patch: expected a text"),
        ({"install_config": '{"test_cmd": "x"}'}, "a__b-1: install_config: expected a mapping"),
        ({"problem_statement": "\ud800", "eval_script": "x"}, "instruction: expected whole characters"),
        ({"install_config": {"test_cmd": "x", "log_parser": [1]}}, "parser: expected one of"),
        ({}, "expected a column eval_script or install_config.test_cmd"),
        ({"eval_script": "x", "log_parser": "parse_log_prettier"}, "parser: expected one of"),
    ],
)
def test_bad_rows_are_named(row, message):
    with pytest.raises(TaskError, match=message):
        importers.swebench_row(ROW | row)


def swebench_repository(root):
    task = {"task.yaml": "repo: a/b\nbase_commit: '00'\nlog_parser: parse_log_gotest\nimage: i\nsplit: test\n"}
    task |= {
        "tests.json": '{"FAIL_TO_PASS": ["TestA"], "PASS_TO_PASS": []}',
        "gold.patch": PATCH.replace("\n", "\r\n"),
        "test.patch": PATCH,
    }
    task |= {"eval.sh": "go test", "problem_statement.md": "Ümlaut", "Dockerfile": "FROM x", "test_assets/p/a.png": b"\x89"}
    files = {f"tasks/a__b-{i}/{name}": content for i in (1, 2) for name, content in task.items()}
    files["tasks/a__b-2/task.yaml"] = files["tasks/a__b-2/task.yaml"].replace("split: test", "split: deprecated")
    return directory(root, files | {"sweb.yaml": "datasets: [x]\nsplits: [test]\n"})


def test_swebench_repositories(tmp_path):
    (task,) = importers.swebench_tasks(swebench_repository(tmp_path))
    assert (task.name, task.instruction, task.verifier.parser) == ("swe-bench/a__b-1", "Ümlaut", "gotest")
    assert b"\r\n" in task.files["solution/gold.patch"]
    assert task.files["tests/test_assets/p/a.png"] == b"\x89"
    (tmp_path / "tasks/a__b-1/gold.patch").unlink()
    with pytest.raises(TaskError, match=r"gold.patch: expected a file, found none"):
        importers.swebench_tasks(tmp_path)


TERMINAL_BENCH = {
    "task.yaml": "instruction: Do it.\nmax_agent_timeout_sec: 100\nmax_test_timeout_sec: 50\ndifficulty: easy\n",
    "Dockerfile": "FROM debian",
    "data/in.txt": "1",
    "run-tests.sh": "pytest $TEST_DIR",
    "tests/test_outputs.py": "def test(): pass",
    "solution.sh": "true",
    "docker-compose.yaml": "services:\n  client: {}\n",
}


def test_terminal_bench(tmp_path):
    task = importers.terminal_bench(directory(tmp_path / "hello", TERMINAL_BENCH))
    assert (task.name, task.instruction, task.agent_timeout_sec, task.verifier.timeout_sec) == (
        "terminal-bench/hello",
        "Do it.",
        100,
        50,
    )
    assert set(task.files) == {
        *("environment/Dockerfile", "environment/data/in.txt", "solution/solve.sh"),
        *("tests/run-tests.sh", "tests/test.sh", "tests/test_outputs.py"),
    }
    save(task, tmp_path / "saved")
    assert load(tmp_path / "saved") == task


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"docker-compose.yaml": "services: {client: {}, db: {}}"}, "expected one service, got client, db"),
        ({"task.yaml": "a: ["}, "task.yaml: expected YAML"),
        ({"task.yaml": "- a"}, "task.yaml: expected a mapping, got list"),
        ({"task.yaml": "difficulty: easy"}, "instruction: expected a text"),
        ({"task.yaml": "descriptions: [x]"}, "instruction: expected a text"),
        ({"task.yaml": "[" * 20_000}, "task.yaml: expected YAML"),
        ({"task.yaml": "instruction: x\nmax_test_timeout_sec: long\n"}, "max_test_timeout_sec: expected a number, got 'long'"),
        ({"docker-compose.yaml": "services:\n"}, "expected one service, got none"),
    ],
)
def test_bad_terminal_bench_is_named(tmp_path, files, message):
    with pytest.raises(TaskError, match=message):
        importers.terminal_bench(directory(tmp_path, TERMINAL_BENCH | files))


def test_predictions(tmp_path):
    importers.write_predictions({"swe-bench/b": PATCH, "a": "é"}, "m", tmp_path / "p.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text("utf-8").splitlines()]
    assert [row["instance_id"] for row in rows] == ["a", "b"]
    assert rows[1] == {"instance_id": "b", "model_name_or_path": "m", "model_patch": PATCH}


def test_saved_tasks_have_what_harbor_reads(tmp_path):
    task = Task(
        "a/b", "x", Environment(image="i", memory_mb=512, network="allowlist", allowed_hosts=("h",)), files={"tests/test.sh": b"x"}
    )
    save(task, tmp_path)
    config = tomllib.loads((tmp_path / "task.toml").read_text())
    assert config["schema_version"] == "1.4"
    assert config["task"] == {"name": "a/b"}
    assert config["environment"]["docker_image"] == "i"
    assert config["environment"]["network_mode"] == "allowlist"
    assert config["environment"]["allowed_hosts"] == ["h"]
    assert config["environment"]["memory_mb"] == 512
    assert (tmp_path / "tests/test.sh").stat().st_mode & 0o111
