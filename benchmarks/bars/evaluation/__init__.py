"""Tasks, the agent and its tools, and what scores mean."""

from benchmarks.bars.evaluation import harness, report, statistics, tasks

BARS = [*tasks.BARS, *harness.BARS, *report.BARS, *statistics.BARS]
