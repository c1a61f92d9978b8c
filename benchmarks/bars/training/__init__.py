"""Bars of training: data and state of runs."""

from benchmarks.bars.training import data, state

BARS = [*data.BARS, *state.BARS]
