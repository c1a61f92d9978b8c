"""`python -m rl train`: what it refuses, what it says it would do, and a whole small run in real sandboxes."""

import json
import shutil

import pytest

from rl.__main__ import main
from rl.config import RunConfig
from rl.demo.base import make_base
from tests.rl_kills import MINUTE, QUICK


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("cache"), MINUTE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--group-size", "0"], "group_size must be at least 1"),
        (["--lr", "nan"], "lr must be a finite"),
        (["--temperature", "0"], "temperature must be positive"),
        (["--trackers", "tensorboard,nope"], "trackers must be of"),
        (["--reply-tokens", "900"], "reply_tokens must be less"),
        (["--tasks", "/nonexistent"], "expected task directories"),
        (["--base", "/nonexistent"], "neither a run"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_what_is_refused(tmp_path, capsys, options, said):
    with pytest.raises(SystemExit) as status:
        main(["train", "--run-dir", str(tmp_path / "run"), "--place", "inline", *options])
    assert status.value.code == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_says_what_would_run_where_and_touches_nothing(tmp_path, capsys):
    assert main(["demo", "--dry-run", "--run-dir", str(tmp_path / "run"), "--samplers", "3"]) == 0
    said = capsys.readouterr().out
    assert "samplers        3 in actors of Ray" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("left", ["checkpoints/step-00000010/state.json", "state.json"])
def test_what_a_directory_holds_is_not_lost(tmp_path, capsys, left):
    """Also where it is a run of `training`; what a start that failed has left is no run."""
    kept = tmp_path / left
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["train", "--run-dir", str(tmp_path), "--place", "inline", "--base", "/nonexistent"])
    assert "holds a run" in capsys.readouterr().err
    assert kept.exists()
    kept.unlink()
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    with pytest.raises(SystemExit):
        main(["train", "--run-dir", str(tmp_path), "--place", "inline", "--base", "/nonexistent"])
    assert "neither a run" in capsys.readouterr().err


def test_a_directory_without_a_run_keeps_its_files(tmp_path, capsys):
    kept = tmp_path / "weights" / "mine"
    kept.parent.mkdir()
    kept.write_text("")
    with pytest.raises(SystemExit):
        main(["train", "--run-dir", str(tmp_path), "--place", "inline", "--base", "/nonexistent"])
    assert kept.exists()


def test_a_run_in_real_sandboxes_goes_on_where_it_stopped(tmp_path, base, capsys):
    run_dir = tmp_path / "run"
    values = QUICK | {"steps": 2, "place": "inline", "base": base, "run_dir": run_dir, "cache_dir": base.parent, "heldout_tasks": 2}
    values |= {"heldout_samples": 2}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    assert main(["train", *options]) == 0
    assert json.loads((run_dir / "config.json").read_text())["steps"] == 2
    with pytest.raises(SystemExit):
        main(["train", *options])
    assert "holds a run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--run-dir", str(run_dir), "--lr", "1"])
    assert "keeps its lr" in capsys.readouterr().err
    assert main(["train", "--resume", "--run-dir", str(run_dir), "--steps", "3"]) == 0
    said = capsys.readouterr().out
    assert "3 steps" in said
    assert {"before.json", "after.json"} <= {path.name for path in (run_dir / "evaluations").iterdir()}
    assert (run_dir / "run.png").stat().st_size > 10_000


def test_a_configuration_is_its_fields():
    with pytest.raises(ValueError, match="place must be one of"):
        RunConfig(place="moon")
    with pytest.raises(ValueError, match="steps must be at least 0"):
        RunConfig(steps=-1)
