"""The page of runs in a browser without a screen."""

import tempfile
from pathlib import Path

from benchmarks.bars.harness import Bar, NotMeasured, Run
from tests import report_cases


def clicks(run: Run) -> float:
    """How many of the plot, a run behind a point, a task's transcript and its diff are reached by clicks."""
    with tempfile.TemporaryDirectory() as directory:
        found = report_cases.clicked(Path(directory))
    if found is None:
        raise NotMeasured("there is no browser here")
    return sum(found[key] is True for key in ("plots", "reached", "transcript", "diff"))


BARS = [Bar("plot, run, transcript and diff reached by clicks", ">=", 4, "of 4", clicks)]
