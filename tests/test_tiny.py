"""The tiny family: instances by seed, the held-out split, verdicts that no code inside can make."""

import json

import pytest

from rl.harness.session import Session
from rl.harness.toolsets import tool_set
from rl.tasks.tiny import instance, solution_calls
from rl.tasks.verification import verify
from rl.tasks.workspace import WORKSPACE
from tests.task_cases import sandboxes  # noqa: F401


def settings(task):
    return json.loads(task.files["tests/runner.json"])


def chain(task):
    source = next(data for path, data in task.files.items() if path.startswith(WORKSPACE)).decode()
    patch = task.files["solution/gold.patch"].decode()
    return next(line for line in reversed((source + patch).splitlines()) if "In this order" in line).split("In this order: ")[1]


def test_instances_are_their_seed_and_splits_share_nothing():
    train, held = ([instance(seed, split) for seed in range(400)] for split in ("train", "heldout"))
    assert [task.digest for task in train[:20]] == [instance(seed).digest for seed in range(20)]
    assert len({task.digest for task in train + held}) == 800
    for what in (lambda t: settings(t)["function"].rsplit("_", 1)[0], lambda t: settings(t)["file"], chain):
        assert not {what(task) for task in train} & {what(task) for task in held}
    assert {task.provenance.difficulty for task in train} == {0, 1 / 3, 2 / 3, 1}
    assert all(len(task.instruction) < 390 for task in train + held)
    assert {instance(seed, difficulty=3).provenance.difficulty for seed in range(5)} == {2 / 3}
    assert all(instance(seed, kinds=("fix",)).instruction.startswith("Fix") for seed in range(20))
    assert {len(settings(task)["function"]) for task in train + held} == {4}
    with pytest.raises(ValueError, match="kinds"):
        instance(0, kinds=("mend",))
    with pytest.raises(ValueError, match="kinds"):
        instance(0, difficulty=1, kinds=("extend",))
    with pytest.raises(ValueError, match="split"):
        instance(0, "test")
    with pytest.raises(ValueError, match="difficulty"):
        instance(0, difficulty=5)


def test_no_expected_value_of_a_graded_call_is_in_the_work_directory():
    for seed in range(200):
        task = instance(seed)
        check = task.files[f"{WORKSPACE}check.py"].decode()
        shown = eval(check.split(" in ", 1)[1].split("\n")[0].rstrip(":"))
        graded = [call[0] for call in settings(task)["calls"]]
        assert len(shown) == 3
        assert not any(case in graded for case, _ in shown)


def test_a_scripted_agent_solves_them(sandboxes):  # noqa: F811
    for seed in range(4):
        task = instance(seed, ("train", "heldout")[seed % 2])
        with sandboxes.start(task) as sandbox:
            session = Session(sandbox)
            assert tool_set(["run_check"]).call(session, "run_check", {}).text not in ("ok", "")
            results = [tool_set().call(session, name, arguments) for name, arguments in solution_calls(task)]
            patch = sandboxes.changes(task, sandbox)
        assert 3 <= len(results) <= 5
        assert results[2].text == "ok"  # check.py
        assert not any(result.text.startswith("Error") for result in results), results
        assert verify(task, patch, sandboxes).reward == 1.0
        assert verify(task, "", sandboxes).reward == 0.0


LIES = {
    "equal to everything": "class Any:\n def __eq__(self, other): return True\ndef f(x): return Any()",
    "exit": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef f(x): os._exit(0)",
    "hang": "def f(x):\n while True: pass",
    "events": "import os\ndef f(x):\n for fd in range(3, 20):\n  try: os.write(fd, b'[0, {}]\\n')\n  except OSError: pass",
    "the runner's own function": "import __main__, sys\n"
    "def f(x):\n frame = sys._getframe(1)\n for i in range(12): frame.f_locals['tell']({'call': i, 'output': 0})\n os._exit(0)",
    "read what is expected": "import glob, json\n"
    "def f(x): return [json.load(open(p)) for p in glob.glob('/tests/*') + glob.glob('/*/expected*') if 'expected' in p][0]",
    "print": 'def f(x): print(\'{"tampered": "", "outputs": {}}\')',
}


@pytest.mark.parametrize("name", LIES)
def test_lies_are_not_paid(sandboxes, name):  # noqa: F811
    task = instance(0)
    file, function = settings(task)["file"], settings(task)["function"]
    with sandboxes.start(task) as sandbox:
        sandbox.write(f"/workspace/{file}", LIES[name].replace("def f(", f"def {function}(").encode())
        patch = sandboxes.changes(task, sandbox)
    assert verify(task, patch, sandboxes).reward == 0.0
