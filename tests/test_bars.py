"""The harness that measures bars, with bars made up for the purpose."""

import importlib
import json
import math

import pytest
import torch

from benchmarks import ceilings, machine, timing
from benchmarks.bars import AREAS, core
from benchmarks.bars import __main__ as command
from benchmarks.bars.cpu import decode, gemm
from benchmarks.bars.harness import Bar, Run, measure, run_bars
from mxmoe import _C

FIELDS = ["name", "target", "measured", "unit", "holds", "machine", "commit", "seconds"]


def bar(name="a bar", value=1.0, *, bound=2.0, **options) -> Bar:
    return Bar(name, "<=", bound, "x", lambda run: value, **options)


def quiet() -> bool:
    return False


def busy() -> bool:
    return True


def test_results_file_has_the_documented_fields(tmp_path, capsys):
    path = tmp_path / "results" / "bars-area.json"
    assert run_bars([bar(), bar("another", 2.0)], results=path, busy=quiet)
    first, second = json.loads(path.read_text())
    assert list(first) == FIELDS
    assert first["name"] == "a bar"
    assert first["target"] == "<= 2"
    assert first["measured"] == 1.0
    assert first["unit"] == "x"
    assert first["holds"] is second["holds"] is True
    assert first["machine"] == machine.describe()
    assert first["commit"] == machine.commit()
    assert not list(path.parent.glob("*.partial"))
    table = capsys.readouterr().out
    assert all(word in table for word in ("name", "target", "measured", "unit", "holds", "another"))


@pytest.mark.parametrize("value", [3.0, math.nan, math.inf])
def test_a_miss_fails_the_run(value, tmp_path):
    path = tmp_path / "bars.json"
    assert not run_bars([bar(), bar("missed", value)], results=path, busy=quiet)
    assert [entry["holds"] for entry in json.loads(path.read_text())] == [True, False]


def test_an_error_fails_its_bar_and_the_others_are_measured(tmp_path, capsys):
    broken = Bar("broken", "<=", 1, "x", lambda run: 1 / 0)
    path = tmp_path / "bars.json"
    assert not run_bars([broken, bar()], results=path, busy=quiet)
    first, second = json.loads(path.read_text())
    assert first["measured"] is None
    assert first["holds"] is False
    assert second["holds"] is True
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_a_ratio_on_a_busy_machine_is_tried_three_times_and_not_judged():
    calls = []
    ratio = Bar("ratio", ">=", 1, "x", lambda run: calls.append(1) or 5.0, kind="ratio")
    result = measure(ratio, Run(), busy)
    assert result.holds is None
    assert result.measured == 5.0
    assert len(calls) == 3
    assert measure(ratio, Run(), quiet).holds is True
    assert len(calls) == 4


def test_a_ratio_is_judged_once_the_machine_is_quiet_before_and_after():
    readings = iter([False, True, True, False, False, False])  # busy after; busy before; quiet
    calls = []
    ratio = Bar("ratio", ">=", 1, "x", lambda run: calls.append(1) or 0.5, kind="ratio")
    assert measure(ratio, Run(), lambda: next(readings)).holds is False
    assert len(calls) == 3


def test_a_busy_machine_excuses_a_long_time_only():
    assert measure(bar(value=9.0, kind="time"), Run(), busy).holds is None
    assert measure(bar(value=9.0, kind="time"), Run(), quiet).holds is False
    assert measure(bar(value=1.0, kind="time"), Run(), busy).holds is True


def test_not_judged_does_not_fail_the_run(tmp_path):
    path = tmp_path / "bars.json"
    assert run_bars([bar(kind="ratio")], results=path, busy=busy)
    assert json.loads(path.read_text())[0]["holds"] is None


def test_values_do_not_ask_whether_the_machine_is_busy():
    def asked():
        raise AssertionError

    assert measure(bar(), Run(), asked).holds is True


def test_long_bars_keep_their_last_result(tmp_path, capsys):
    path = tmp_path / "bars.json"
    assert run_bars([bar("long", 1.0, long=True)], results=path, busy=quiet)
    assert "never measured" in capsys.readouterr().out
    assert not path.exists()
    assert not run_bars([bar("long", 9.0, long=True)], long=True, results=path, busy=quiet)
    assert not run_bars([bar("long", 1.0, long=True), bar("short")], results=path, busy=quiet)
    assert "last result" in capsys.readouterr().out
    assert {e["name"]: e["measured"] for e in json.loads(path.read_text())} == {"long": 9.0, "short": 1.0}


def test_measuring_one_bar_keeps_the_other_results(tmp_path):
    path = tmp_path / "bars.json"
    run_bars([bar("one"), bar("two")], results=path, busy=quiet)
    run_bars([bar("two", 1.5)], results=path, busy=quiet)
    assert {e["name"]: e["measured"] for e in json.loads(path.read_text())} == {"one": 1.0, "two": 1.5}


def test_a_quick_run_stores_nothing(tmp_path, capsys):
    counted = Bar("counted", "<=", 10, "x", lambda run: float(run.count(1000, least=3)))
    assert run_bars([counted], quick=True, results=tmp_path / "bars.json", busy=quiet)
    assert not (tmp_path / "bars.json").exists()
    assert "quick" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ['[{"name": ', '{"name": 1}', '[{"name": "a bar"}]', "[1]", "\x00"])
def test_a_damaged_results_file_is_named_and_left_alone(damage, tmp_path):
    path = tmp_path / "bars.json"
    path.write_text(damage)
    with pytest.raises(ValueError, match=r"bars\.json is damaged"):
        run_bars([bar()], results=path, busy=quiet)
    assert path.read_text() == damage


@pytest.fixture
def core_results(monkeypatch, tmp_path):
    """The command line measures made-up bars as the area "core"; returns the path of its results file, in another tree."""
    monkeypatch.setattr(core, "BARS", [bar("kept"), bar("missed", 3.0)])
    monkeypatch.setattr(command, "ROOT", tmp_path)
    return tmp_path / "benchmarks" / "results" / "bars-core.json"


def test_exit_status_is_1_where_a_bar_does_not_hold(core_results):
    assert command.main(["core"]) == 1
    assert [entry["holds"] for entry in json.loads(core_results.read_text())] == [True, False]


def test_exit_status_is_0_where_the_bars_asked_for_hold(core_results):
    assert command.main(["core", "--only", "kept"]) == 0
    assert [entry["name"] for entry in json.loads(core_results.read_text())] == ["kept"]


def test_only_an_unknown_name_is_exit_status_2(core_results, capsys):
    assert command.main(["core", "--only", "no such bar"]) == 2
    assert "no bar has 'no such bar' in its name" in capsys.readouterr().err
    assert not core_results.exists()


def test_an_unknown_area_is_exit_status_2(capsys):
    with pytest.raises(SystemExit) as exit:
        command.main(["moon"])
    assert exit.value.code == 2
    assert "core" in capsys.readouterr().err


def test_a_damaged_results_file_is_exit_status_2(core_results, capsys):
    core_results.parent.mkdir(parents=True)
    core_results.write_text("[{")
    assert command.main(["core"]) == 2
    assert "bars-core.json is damaged" in capsys.readouterr().err
    assert core_results.read_text() == "[{"


def test_list_measures_nothing(core_results, capsys):
    assert command.main(["core", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["kept: <= 2 x", "missed: <= 2 x"]
    assert not core_results.exists()


def test_progress_counts_the_items():
    class Shown:
        def reset(self, total):
            self.total, self.done = total, 0

        def update(self):
            self.done += 1

    shown = Shown()
    assert list(Run(bar=shown).steps(range(5))) == [0, 1, 2, 3, 4]
    assert (shown.total, shown.done) == (5, 5)


def test_providers_take_turns_in_changing_order():
    calls: list[str] = []
    times = timing.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=8, warmup=1)
    rounds = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert len(rounds) == 9
    assert set(rounds) == {("a", "b"), ("b", "a")}  # everyone once a round, and neither always first
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 8, "b": 8}


@pytest.fixture
def clock(monkeypatch):
    """Calls return the seconds they would take, on a machine that is ten times slower in every second round of two."""
    turns = iter(range(1000))
    monkeypatch.setattr(timing, "once", lambda call: call() * (10 if next(turns) // 2 % 2 else 1))


def test_ratios_are_those_of_a_round(clock):
    assert timing.ratio(lambda: 3.0, lambda: 1.5, repeats=7) == 2.0
    assert timing.speedup(lambda: 3.0, lambda: 1.5, repeats=7) == 0.5


def test_the_fastest_is_found(monkeypatch):
    monkeypatch.setattr(timing, "once", lambda call: call())
    assert timing.fastest({"slow": lambda: 50.0, "near": lambda: 2.0, "fast": lambda: 1.0}) == "fast"


def test_a_share_is_of_the_faster_ceiling(monkeypatch):
    monkeypatch.setattr(timing, "once", lambda call: call())
    roof = {"a": ceilings.Ceiling(lambda: 4.0, 2.0), "b": ceilings.Ceiling(lambda: 4.0, 8.0)}
    assert ceilings.share(lambda: 4.0, 2.0, roof, repeats=3) == 0.25


def test_notes_are_shown_beside_the_result(tmp_path, capsys):
    path = tmp_path / "bars.json"
    run_bars([Bar("noted", "<=", 1, "x", lambda run: run.note("the best peer") or 0.5)], results=path, busy=quiet)
    assert "the best peer" in capsys.readouterr().out
    assert list(json.loads(path.read_text())[0]) == FIELDS


@pytest.mark.parametrize("area", AREAS)
def test_names_of_bars_are_unique(area):
    names = [bar.name for bar in importlib.import_module(f"benchmarks.bars.{area}").BARS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("isa", _C.isas())
def test_probes_do_what_they_say(isa):
    source = torch.arange(3_000_001).to(torch.uint8)
    for stream in (False, True):
        target = torch.full((3_000_002,), 7, dtype=torch.uint8)
        _C.copy_bytes(target[1:], source, 3_000_000, stream, isa, 2)
        assert torch.equal(target[1:-1], source[:-1])
        assert target[0] == target[-1] == 7
    zeros = torch.zeros(1000, dtype=torch.uint8)
    assert _C.read_bytes(zeros, 1000, isa, 2) == 0
    for i in (0, 256, 999):
        zeros[i] = 1
        assert _C.read_bytes(zeros, 1000, isa, 2) != 0
        zeros[i] = 0
    assert (_C.multiply_add(True, 8, isa, 1) > 0) == (isa == "avx512")
    assert _C.multiply_add(False, 16, isa, 2) > _C.multiply_add(False, 8, isa, 2) > 0
    with pytest.raises(ValueError, match="vector of at least 1001 bytes"):
        _C.read_bytes(zeros, 1001, isa, 2)


def test_skewed_groups_use_every_row():
    offs = gemm.zipf(4096, 64)
    sizes = torch.diff(offs, prepend=torch.zeros(1, dtype=torch.int32))
    assert offs[-1] == 4096
    assert sizes.min() >= 0
    assert sizes.max() > 10 * 64


def test_decoding_calls_rotate_over_the_experts():
    case = decode.case_of(Run(quick=True))
    assert torch.cat([ids.flatten() for ids in decode.choices(case, 1)]).unique().shape == (64,)
    for ids in decode.choices(case, 8):
        assert ids.shape == (8, 8)
        assert len(ids.unique()) == decode.DISTINCT


def test_others_are_what_this_process_does_not_use():
    before = machine.CpuTime(busy=100.0, own=10.0, wall=0.0)
    after = machine.CpuTime(busy=103.0, own=11.0, wall=2.0)
    assert machine.others_between(before, after) == 1.0
    assert machine.cores_used_by_others(0.05) >= 0
