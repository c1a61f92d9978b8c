"""Tasks, the agent and its tools, and what scores mean."""

from benchmarks.bars.evaluation import tasks

BARS = [*tasks.BARS]
