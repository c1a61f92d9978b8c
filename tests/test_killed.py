"""The loop under kills: a few in each run of the suite's slow part; forty are a bar (benchmarks/bars/rl)."""

import pytest

from tests.rl_kills import VICTIMS, killed_run


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_finishes_and_loses_nothing(tmp_path):
    pytest.importorskip("ray", reason="Ray is an extra")
    found = killed_run(tmp_path, kills=len(VICTIMS), steps=16)
    assert found.pop("kills") == dict.fromkeys(VICTIMS, 1)
    assert not any(found.values()), (found, (tmp_path / "log.txt").read_text()[-2000:])
