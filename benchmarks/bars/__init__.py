"""Bars: numbers the project promises. `python -m benchmarks.bars [AREA]` measures them (see `--help`); each area is a module
with a list BARS."""

AREAS = ("core", "cpu", "gpu", "triton", "environments", "training", "rl", "evaluation")
