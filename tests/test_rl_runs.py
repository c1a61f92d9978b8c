"""What is made of whole runs' numbers; the runs themselves take hours."""

import json
from dataclasses import fields

import pytest

from benchmarks import rl_runs
from benchmarks.bars.harness import NotMeasured, Run
from benchmarks.bars.rl import runs
from rl.config import RunConfig, add_arguments


def record(name: str, seed: int, gain: float = 0.2, loss: float = 1.0, after: float = 0.5) -> dict:
    return {
        "name": name,
        "seed": seed,
        "commit": "abc",
        "gains": {"mean": [gain, 0.02], "best": [gain / 2, 0.04]},
        "before": {"mean": 0.2, "parsed": 0.97, "tasks": 200},
        "after": {"mean": after},
        "heldout_loss": loss,
        "loop_seconds": 600.0,
        "base_seconds": 60.0,
    }


def test_every_run_has_a_name_of_its_own_and_options_that_the_command_takes():
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    experiments = rl_runs.plan(3)
    assert len({e.title for e in experiments}) == len(experiments) == 3 * (1 + len(rl_runs.BUDGETS) + len(rl_runs.VARIANTS))
    for e in experiments:
        parsed = vars(parser.parse_args([rl_runs.option_of(name, value) for name, value in e.values.items()]))
        assert parsed == {name: value for name, value in e.values.items()}
        assert set(e.values) <= {f.name for f in fields(RunConfig)}


def test_what_is_recorded_here_or_in_the_results_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_runs, "RESULTS", tmp_path / "rl-runs.json")
    experiments = rl_runs.plan(2)
    assert rl_runs.missing(tmp_path, experiments) == experiments
    first, second, third = (json.loads(json.dumps(e.described)) for e in experiments[:3])
    changed = first["values"] | {"steps": first["values"]["steps"] + 1}
    rl_runs.RESULTS.write_text(json.dumps({"command": rl_runs.COMMAND, "runs": [first | {"values": changed}, second]}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text(json.dumps(third | {"commit": "abc"}))
    assert rl_runs.missing(tmp_path, experiments) == [experiments[0], *experiments[3:]]
    (tmp_path / "run" / "record.json").write_text(json.dumps(first | {"commit": "abc"}))
    assert rl_runs.collect(tmp_path)["runs"] == [first | {"commit": "abc"}, second]


def test_bars_read_what_was_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(rl_runs, "RESULTS", tmp_path / "rl-runs.json")
    with pytest.raises(NotMeasured, match="was not run"):
        runs.points(Run())
    found = [record("demo", seed, gain) for seed, gain in enumerate((0.2, 0.17, 0.3))]
    rl_runs.RESULTS.write_text(json.dumps({"command": rl_runs.COMMAND, "runs": found[:2]}))
    with pytest.raises(NotMeasured, match="2 of 3"):
        runs.points(Run())
    rl_runs.RESULTS.write_text(json.dumps({"command": rl_runs.COMMAND, "runs": found}))
    assert runs.points(Run()) == pytest.approx(17)
    assert runs.errors("mean", Run()) == pytest.approx(8.5)
    assert runs.errors("best", Run()) == pytest.approx(0.085 / 0.04)
    assert (runs.minutes(Run()), runs.base_minutes(Run()), runs.solved(Run())) == (10, 1, 20)
    rl_runs.draw({"runs": found}, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


@pytest.mark.parametrize(("rewards", "wrong"), [((0.2, 0.3, 0.4), 0), ((0.2, 0.4, 0.3), 1), ((0.4, 0.3, 0.2), 2)])
def test_budgets_are_in_order(tmp_path, monkeypatch, rewards, wrong):
    monkeypatch.setattr(rl_runs, "RESULTS", tmp_path / "rl-runs.json")
    found = [
        record(f"budget-{steps}", seed, loss=loss, after=after)
        for steps, loss, after in zip(rl_runs.BUDGETS, (3.0, 2.0, 1.0), rewards, strict=True)
        for seed in range(3)
    ]
    rl_runs.RESULTS.write_text(json.dumps({"command": rl_runs.COMMAND, "runs": found}))
    assert runs.monotone(Run()) == wrong
