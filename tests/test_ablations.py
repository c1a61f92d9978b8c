"""What is made of the experiments' numbers; the experiments themselves take hours."""

import json

import pytest

from benchmarks import ablations
from benchmarks.bars.harness import NotMeasured, Run
from benchmarks.bars.training import quality


def pair(recipe: str, seed: int, loss: float) -> dict:
    return dict(name=f"pair-{recipe}-{seed}", base="", recipe=recipe, seed=seed, heldout_loss=loss, commit="abc")


def budget(steps: int, loss: float) -> dict:
    return dict(
        name=f"budget-{steps}", base="", recipe="mxfp8", seed=0, flop=1e9 * steps, steps=steps, heldout_loss=loss, commit="abc"
    )


RUNS = [pair("bf16", 0, 5.0), pair("mxfp8", 0, 5.01), pair("bf16", 1, 4.0), pair("mxfp8", 1, 4.0), pair("nvfp4", 1, 4.1)]
RUNS += [budget(steps, loss) for steps, loss in ((1000, 5.0), (10, 7.0), (100, 6.0), (10000, 4.0))]


def test_pairs_are_compared_by_seed_and_budgets_lie_on_a_line(tmp_path):
    assert ablations.excess({"runs": RUNS}, "mxfp8") == pytest.approx((0.1, 0.1, 2))
    with pytest.raises(ValueError, match="at least two pairs of nvfp4 and bf16 runs are needed, got 1"):
        ablations.excess({"runs": RUNS}, "nvfp4")
    runs = ablations.budgets({"runs": RUNS})
    assert [run["steps"] for run in runs] == [10, 100, 1000, 10000]
    assert ablations.line(runs) == pytest.approx((-1.0, 17.0, 1.0))
    ablations.draw(runs, tmp_path / "line.png")
    assert (tmp_path / "line.png").stat().st_size > 5000


def test_bars_read_only_results_that_name_command_and_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(ablations, "RESULTS", tmp_path / "ablations.json")
    for results in (None, {"runs": RUNS}, {"command": "make ablations", "runs": [RUNS[0] | {"commit": ""}]}):
        if results:
            ablations.RESULTS.write_text(json.dumps(results))
        with pytest.raises(NotMeasured):
            quality.fit(Run())
    ablations.RESULTS.write_text(json.dumps({"command": "make ablations", "runs": RUNS}))
    assert quality.fit(Run()) == pytest.approx(1.0)
    assert quality.excess("mxfp8", 0, Run()) == pytest.approx(0.1)
    for measure in (lambda: quality.excess("nvfp4", 0, Run()), lambda: quality.beyond(Run())):
        with pytest.raises(NotMeasured):
            measure()


def test_every_run_has_a_name_and_what_it_begins_with_is_one_of_them():
    runs = ablations.plan(3)
    names = [run.name for run in runs]
    assert len(set(names)) == len(names) == 5 + 9
    assert all(run.base in ("", *names) for run in runs)
