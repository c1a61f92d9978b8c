"""Verification: fresh sandbox, hidden tests, what a change is worth; and what it is not worth (tests/task_cases.HACKS)."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rl.environments.sandbox import SandboxError, SandboxLost
from rl.tasks.check import check
from rl.tasks.task import Task, TaskError, Verifier
from rl.tasks.verification import Verdict, Verdicts, apply, verify
from rl.tasks.workspace import Entry, WorkLost, difference, recipe_of, tree
from tests.task_cases import BUGGY, FIXED, HACKS, SHOP, SLOW_HACKS, paid, sandboxes  # noqa: F401

FILE = "shop/price.py"
FIX = difference({FILE: Entry(0o100644, BUGGY.encode())}, {FILE: Entry(0o100644, FIXED.encode())})


def test_the_solution_is_paid_and_nothing_is_not(sandboxes):  # noqa: F811
    found = verify(SHOP, FIX, sandboxes)
    assert (found.reward, found.status) == (1.0, "resolved"), found
    assert found.grade.fail_to_pass == found.grade.pass_to_pass == 1.0
    nothing = verify(SHOP, "", sandboxes)
    assert (nothing.reward, nothing.status, nothing.grade.pass_to_pass) == (0.0, "failed", 1.0)
    assert "assert" in nothing.log
    assert not sandboxes.backend.sandboxes()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_HACKS else ()) for name in HACKS])
def test_hacks_are_not_paid(sandboxes, name):  # noqa: F811
    assert paid(sandboxes, name) == 0.0


def test_the_agent_sees_one_commit_and_no_tests(sandboxes):  # noqa: F811
    """A work directory whose repository knows the solution: branches, tags, stashes, reflogs, loose objects, a remote."""
    history = """
set -e; export HOME=/tmp; git config --global user.email a@b; git config --global user.name a
git add -A; git commit -qm base; git checkout -qb fix; sed -i 's/prices.0./sum(prices)/' shop/price.py; git commit -qam 'fix'
git tag fixed; git remote add origin https://example.com/x; git checkout -q -; echo x >> shop/price.py; git stash -q; git gc -q
mkdir -p old/__pycache__ sub; git init -q sub; echo x > old/__pycache__/a.pyc
"""
    with sandboxes.backend.create(sandboxes._spec(SHOP, *sandboxes.root(SHOP))) as sandbox:
        for path, data in SHOP.files.items():
            if path.startswith("environment/workspace/"):
                sandbox.write("/workspace/" + path.removeprefix("environment/workspace/"), data)
        assert sandbox.exec("git init -q .; " + history, cwd="/workspace").ok
        snapshot = sandbox.snapshot()
    task = replace(SHOP, name="tests/history", environment=replace(SHOP.environment, image="repository"))
    sandboxes.roots["repository"] = snapshot
    with sandboxes.start(task) as sandbox:
        look = "git log --all --format=%s; git tag; git remote; git stash list; git fsck --lost-found; git for-each-ref"
        assert sandbox.exec(look, cwd="/workspace").stdout.split()[::3] == [b"base", b"refs/heads/main"]
        every = sandbox.exec("git cat-file --batch-all-objects --batch | grep -c 'sum(prices)'", cwd="/workspace")
        assert every.stdout == b"0\n"
        assert not sandbox.exec("git show fixed || git reflog | grep fix", cwd="/workspace").ok
        assert sandbox.exec("find / -xdev -name '*.pyc' -path '*workspace*' -o -path '/tests*' -o -path '/solution*'").stdout == b""
        verify(SHOP, FIX, sandboxes)
        assert not sandbox.exec("ls -d /tests /logs").stdout  # verification was elsewhere
    snapshot.drop()


def test_changes_survive_whatever_the_repository_says(sandboxes):  # noqa: F811
    """Broken pointers, nested repositories, ignored files: the change is read from the files."""
    script = (
        "rm .git/HEAD; echo shop > .gitignore; mkdir sub; git init -q sub; echo new > sub/file; sed -i 's/.0./[-1]/' shop/price.py"
    )
    with sandboxes.start(SHOP) as sandbox:
        sandbox.exec(script, cwd="/workspace")
        patch = sandboxes.changes(SHOP, sandbox)
        after = tree(sandbox, "/workspace")
    assert {".gitignore", "sub/file", FILE} <= {
        line.split(" b/")[1] for line in patch.splitlines() if line.startswith("diff --git")
    }
    with sandboxes.start(SHOP) as sandbox:
        assert sandbox.exec("git apply -", cwd="/workspace", stdin=patch.encode()).ok
        assert tree(sandbox, "/workspace") == after


TAR = """#!/usr/bin/env python3
import io, tarfile
with tarfile.open("/tmp/.tree.tar", "w") as archive:
    for name, target in ENTRIES:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.REGTYPE, "")
        archive.addfile(member, io.BytesIO(b""))
"""


@pytest.mark.parametrize("entries", [[("x", "OUTSIDE"), ("x/new", "")], [("x", ""), ("x/y", "")], [(".", "")], [("x" * 300, "")]])
def test_an_archive_of_the_agents_making_writes_nothing_here(sandboxes, tmp_path, entries):  # noqa: F811
    """tar is the agent's, as all of its sandbox: a link in the archive, and a file below it, must lead nowhere."""
    entries = [(name, target.replace("OUTSIDE", str(tmp_path))) for name, target in entries]
    with sandboxes.start(SHOP) as sandbox:
        sandbox.write("/tmp/tar", TAR.replace("ENTRIES", repr(entries)).encode(), mode=0o755)
        assert sandbox.exec("cp /tmp/tar $(command -v tar)").ok
        with pytest.raises(WorkLost, match="expected files in directories"):
            sandboxes.changes(SHOP, sandbox)
    assert not list(tmp_path.iterdir())


def test_changes_apply_where_there_is_no_git(sandboxes):  # noqa: F811
    """As with git: modes, empty files, and names that git puts in quotes."""
    before = {"shop/price.py": Entry(0o100644, BUGGY.encode()), "gone": Entry(0o100644, b"")}
    after = {"shop/price.py": Entry(0o100755, FIXED.encode()), "a b/ü\t.sh": Entry(0o100755, b"x\n"), "e": Entry(0o100644, b"")}
    with sandboxes.start(SHOP) as sandbox:
        sandbox.exec("rm -rf * .[!.]*; mkdir shop; touch gone", cwd="/workspace")
        sandbox.write("/workspace/shop/price.py", BUGGY.encode())
        assert apply(sandbox, "/workspace", difference(before, after), has_git=False) == ""
        assert tree(sandbox, "/workspace") == after


def test_a_sandbox_has_the_environment_of_its_image(sandboxes, monkeypatch):  # noqa: F811
    dockerfile = {"environment/Dockerfile": b"FROM debian\nENV A=1 B=2\n"}
    recipe, env = recipe_of(replace(SHOP, files=dockerfile))
    assert (recipe.debian, env) == ((), {"A": "1", "B": "2"})
    made = recipe_of(SHOP)[0], env
    monkeypatch.setattr("rl.tasks.workspace.recipe_of", lambda task: made)
    with sandboxes.start(replace(SHOP, environment=replace(SHOP.environment, env={"B": "3"}))) as sandbox:
        assert sandbox.exec("echo $A $B").stdout == b"1 3\n"


def test_names_that_no_path_here_can_have_are_no_failure_of_the_machinery(sandboxes):  # noqa: F811
    deep = "python3 -c \"import os\nfor i in range(20): os.mkdir('d' * 200); os.chdir('d' * 200)\nopen('f', 'w')\""
    with sandboxes.start(SHOP) as sandbox:
        assert sandbox.exec(deep, cwd="/workspace").ok
        with pytest.raises(WorkLost):
            sandboxes.changes(SHOP, sandbox)
    with sandboxes.start(SHOP) as sandbox:
        sandbox.exec("echo 1 > ..rc", cwd="/workspace")
        assert "b/..rc" in sandboxes.changes(SHOP, sandbox)


LIAR = """
import sys
frame = sys._getframe()
while frame and "tell" not in frame.f_locals:
    frame = frame.f_back
if frame:
    frame.f_locals["tell"]({"test": "x", "status": "FINE"})
"""


def test_a_result_that_is_none_is_found_out(sandboxes):  # noqa: F811
    lying = difference({FILE: Entry(0o100644, BUGGY.encode())}, {FILE: Entry(0o100644, (LIAR + BUGGY).encode())})
    found = verify(SHOP, lying, sandboxes)
    assert (found.reward, found.status) == (0.0, "tampered"), found
    half = verify(SHOP, FIX + "\ud800", sandboxes)
    assert (half.reward, half.status, "expected UTF-8" in half.reason) == (0.0, "not_applied", True)


def test_a_difference_applies_exactly(sandboxes):  # noqa: F811
    """Bytes, modes, links, names with spaces, and line ends come back."""
    before = sandboxes.base(SHOP).tree
    after = before | {
        "a b/ü.txt": Entry(0o100644, "ü\r\nx".encode()),
        "bin": Entry(0o100755, bytes(range(256)) * 20),
        "latin": Entry(0o100644, b"caf\xe9\n"),
        "link": Entry(0o120000, b"shop/price.py"),
        "empty": Entry(0o100644, b""),
    }
    del after["tests/test_price.py"]
    patch = difference(before, after)
    assert json.loads(json.dumps(patch)) == patch
    with sandboxes.start(SHOP) as sandbox:
        assert sandbox.exec("git apply --whitespace=nowarn -", cwd="/workspace", stdin=patch.encode("utf-8", "surrogateescape")).ok
        assert tree(sandbox, "/workspace") == after
    assert difference(before, before) == ""


@pytest.mark.parametrize(
    ("patch", "status"),
    [
        (FIX.replace("\n", "\r\n"), "resolved"),  # a patch with CRLF on a file with LF
        (FIX.replace("-    return prices[0]", "-    return prices[7]"), "not_applied"),
        (FIX.replace("shop/price.py", "../etc/passwd"), "not_applied"),
        ("nonsense", "not_applied"),
        (FIX + "x" * (17 << 20), "not_applied"),
    ],
)
def test_patches_that_others_wrote(sandboxes, patch, status):  # noqa: F811
    found = verify(SHOP, patch, sandboxes)
    assert found.status == status, found
    assert bool(found.reason) == (status != "resolved")


def test_foreign_tasks_are_graded_by_their_output_or_exit_status(sandboxes):  # noqa: F811
    def task(script, **verifier):
        return replace(SHOP, verifier=Verifier(**verifier), files=SHOP.files | {"tests/test.sh": script.encode()})

    check = "python3 -c 'from shop.price import total; assert total([1, 2]) == 3'"
    by_exit = task(check, parser="pytest", report=None)
    assert verify(by_exit, FIX, sandboxes).reward == 1.0
    assert verify(by_exit, "", sandboxes).status == "failed"
    log = task(f"{check} && echo PASSED a || echo FAILED a", parser="pytest", report=None, fail_to_pass=("a",))
    assert verify(log, FIX, sandboxes).reward == 1.0
    assert verify(log, "", sandboxes).reward == 0.0
    junit = '<testsuite><testcase name="a"/></testsuite>'
    report = task(f"{check} && echo '{junit}' > /logs/report.xml", fail_to_pass=("a",))
    assert verify(report, FIX, sandboxes).reward == 1.0
    assert verify(report, "", sandboxes).status == "invalid"
    linked = task(f"echo '{junit}' > /tmp/x; ln -s /tmp/x /logs/report.xml", fail_to_pass=("a",))
    assert verify(linked, FIX, sandboxes).status == "invalid"
    slow = task("sleep 60", parser="pytest", report=None, timeout_sec=0.3)
    assert verify(slow, FIX, sandboxes).status == "timeout"


def test_a_failure_of_the_machinery_is_no_reward(sandboxes, monkeypatch):  # noqa: F811
    tries = []

    def lost(task, lease_s):
        tries.append(task.name)
        raise SandboxLost("gone")

    monkeypatch.setattr(sandboxes, "start", lost)
    with pytest.raises(SandboxError, match="gone"):
        verify(SHOP, FIX, sandboxes)
    assert len(tries) == 2


def test_a_change_is_verified_once(monkeypatch):
    """Also by threads that come at the same time; failures of the machinery are tried again, and nothing grows without end."""
    done, gate = [], threading.Event()

    def verifying(task, patch, _, *, answer=""):
        done.append(patch)
        gate.wait(5)
        if patch == "lost" and done.count("lost") == 1:
            raise SandboxLost("gone")
        return Verdict(float(patch == "good"), "resolved")

    monkeypatch.setattr("rl.tasks.verification.verify", verifying)
    verdicts = Verdicts(capacity=3)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(verdicts, SHOP, patch, None) for patch in ("good", "bad", "good", "good")]
        gate.set()
        assert [future.result().reward for future in found] == [1.0, 0.0, 1.0, 1.0]
    assert sorted(done) == ["bad", "good"]
    assert (verdicts.hits, verdicts.misses) == (2, 2)
    with pytest.raises(SandboxLost):
        verdicts(SHOP, "lost", None)
    assert verdicts(SHOP, "lost", None).reward == 0.0
    for i in range(10):
        verdicts(SHOP, f"{i}", None)
    assert len(verdicts._known) == 3


def test_a_task_that_passes_without_a_change_is_not_sound(sandboxes):  # noqa: F811
    gold = SHOP.files | {"solution/gold.patch": FIX.encode()}
    assert check(replace(SHOP, files=gold), sandboxes, times=1).sound
    verifier = replace(SHOP.verifier, fail_to_pass=SHOP.verifier.pass_to_pass, pass_to_pass=())
    found = check(replace(SHOP, files=gold, verifier=verifier), sandboxes, times=1)
    assert (found.sound, found.gold, found.empty) == (False, 1, 1)


def test_answers(sandboxes):  # noqa: F811
    task = Task(
        name="tests/question",
        instruction="where?",
        verifier=Verifier(parser="answer", report=None),
        files={"tests/answer.json": json.dumps({"has": ["a.py", "b"], "has_not": ["c"]}).encode()},
    )
    assert verify(task, "", sandboxes, answer="In `a.py`, function b.").reward == 1.0
    for wrong in ("", "In a.py", "aa.py and b", "a.py: b and c"):
        assert verify(task, "", sandboxes, answer=wrong).reward == 0.0


def test_tasks_without_an_image(sandboxes):  # noqa: F811
    bare = replace(SHOP, files={"tests/test.sh": b""})
    with pytest.raises(TaskError, match="no image hub"):
        sandboxes.start(bare)
    with pytest.raises(TaskError, match="no image hub"):
        sandboxes.start(replace(SHOP, environment=replace(SHOP.environment, image="x/y:1")))
    with pytest.raises(TaskError, match=r"recipe\.toml"):
        sandboxes.start(replace(SHOP, files=SHOP.files | {"environment/recipe.toml": b"base = 3"}))
