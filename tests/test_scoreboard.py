"""The scoreboard: what it compares, how it judges, and that the document shows what was measured."""

import json
import time

import pytest
import torch

from benchmarks.cases import SHAPES, Shape
from benchmarks.scoreboard import __main__ as command
from benchmarks.scoreboard import measure, render, verbs
from benchmarks.scoreboard.measure import Comparison, Provider, Roofs, Row

SMALL = Shape("small", 64, 32, 8, 2)


@pytest.mark.tree
def test_the_document_shows_the_results():
    assert render.shown_in(render.DOCUMENT) == render.table(render.read())


@pytest.mark.tree
def test_the_picture_is_of_the_results():
    results = render.read()
    if results is None:
        assert not render.PICTURE.exists()
    else:
        assert render.digest(results).encode() in render.PICTURE.read_bytes()


def row(provider: str, seconds: float | None, note: str = "", **changes) -> dict:
    fields = dict(
        verb="verb", shape="shape", tokens=8, routing="balanced", rounds=3, flops=1e9, bytes=1e6, share=0.5, preallocated=True
    )
    return Row(provider=provider, seconds=seconds, note=note, **fields | changes).stored()


def results_of(*rows: dict, busy: bool = False) -> dict:
    fixed = dict(command="a command", conditions="a machine", minutes=2.0, others=0.7, roofs={"bytes": 5e10, "flops": None})
    return dict(fixed, busy=busy, rows=list(rows))


def test_the_table_says_where_we_lose():
    text = render.table(
        results_of(row("ours bf16", 2e-3), row("ours mxfp8", 0.5e-3), row("torch", 1e-3), row("slow", 9.0, "one call"))
    )
    assert "bf16 **loses** 0.50x, mxfp8 2.00x (torch)" in text
    assert "| 2 (50 %) | 0.5 (50 %) | 1 (50 %) | 9000 (50 %), one call |" in text
    assert "a machine" in text
    assert "a command" in text
    assert "50 GB/s, - GFLOP/s" in text
    assert "say little" not in text


def test_the_table_names_what_is_left_out():
    text = render.table(
        results_of(row("ours", 1e-3), row("torch", None, "too large: 9 GiB"), row("", None, "out of time", tokens=9), busy=True)
    )
    assert "| too large: 9 GiB |" in text
    assert "| shape | 9 | balanced |  |  | out of time |" in text
    assert "used 0.7 cores" in text


def test_a_document_is_written_between_its_marks(tmp_path):
    document = tmp_path / "page.md"
    document.write_text(f"before\n{render.MARKS[0]}old{render.MARKS[1]}\nafter\n")
    results = results_of(row("ours", 1e-3))
    render.write_document(results, document)
    assert render.shown_in(document) == render.table(results)
    assert document.read_text().startswith("before\n")
    assert document.read_text().endswith("<!-- end -->\nafter\n")


def test_a_picture_names_its_results(tmp_path):
    results = results_of(row("ours", 1e-3), row("torch", 1e-3, flops=0.0), row("slow", None, "too large"))
    render.write_picture(results, tmp_path / "picture.png")
    assert render.digest(results).encode() in (tmp_path / "picture.png").read_bytes()


def compare(**providers) -> Comparison:
    return Comparison("verb", "shape", 1, "balanced", 0.0, lambda: providers)


def fails():
    raise ValueError("no such thing")


def test_every_provider_has_a_row():
    quick = Provider(lambda: time.sleep(1e-4), 1e4, True, note=lambda: "said at the end")
    rows = measure.measure(compare(quick=quick, broken=Provider(fails, 1.0), absent="too large"), Roofs(), seconds=0.0)
    assert [r.provider for r in rows] == ["quick", "broken", "absent"]
    assert rows[0].seconds > 1e-4
    assert 1 <= rows[0].rounds <= measure.ROUNDS[1]
    assert 0 < rows[0].share < 1
    assert [r.note for r in rows] == ["said at the end", "ValueError: no such thing", "too large"]
    assert [r.seconds for r in rows[1:]] == [None, None]


def test_a_slow_provider_is_called_once(monkeypatch):
    monkeypatch.setattr(measure, "SLOW", 0.01)
    calls = []
    slow = Provider(lambda: calls.append(time.sleep(0.05)), 1.0)
    (only,) = measure.measure(compare(slow=slow), Roofs(), seconds=0.0)
    assert len(calls) == only.rounds == 1
    assert only.note == "one call"


def test_balanced_experts_are_equally_busy_and_rotate():
    for shape in (SMALL, *SHAPES):
        calls = verbs.expert_ids(shape, 24, "balanced")
        counts = calls[0].flatten().bincount(minlength=shape.num_experts)
        assert counts.max() - counts.min() <= 1
        assert not torch.equal(calls[0], calls[1])


@pytest.mark.parametrize("routing", ["balanced", "skewed"])
def test_the_experts_of_a_token_are_distinct(routing):
    for ids in verbs.expert_ids(SMALL, 50, routing):
        assert ids.shape == (50, 2)
        assert ((ids >= 0) & (ids < 8)).all()
        assert (ids[:, 0] != ids[:, 1]).all()


def test_skewed_experts_are_not_equally_busy():
    counts = verbs.expert_ids(SMALL, 400, "skewed")[0].flatten().bincount(minlength=8)
    assert counts.max() > 4 * counts.min()


def test_names_of_comparisons_are_unique():
    titles = [c.title for c in command.everything(quick=True)]
    assert len(titles) == len(set(titles))


def test_a_part_is_printed_and_not_stored(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(render, "RESULTS", tmp_path / "scoreboard.json")
    assert command.main(["--quick", "--only", "permute, tiny"]) == 0
    assert "#### permute" in capsys.readouterr().out
    assert not render.RESULTS.exists()
    assert command.main(["--quick", "--only", "no such verb"]) == 2


def test_what_there_is_no_time_for_is_named(capsys):
    assert command.main(["--quick", "--only", "permute, tiny", "--minutes", "0"]) == 0
    assert "not measured: out of time" in capsys.readouterr().out


def test_rows_can_be_stored():
    assert json.loads(json.dumps(results_of(row("ours", 1e-3))))["rows"][0]["provider"] == "ours"
