"""Bars of training: the model beside transformers and in its deterministic mode, data, and state of runs."""

from benchmarks.bars.training import data, model, state

BARS = [*model.BARS, *data.BARS, *state.BARS]
