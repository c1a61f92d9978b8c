"""Bars of training: the model beside transformers and in its deterministic mode, data, state of runs, what low precision costs,
speed, conversion of checkpoints."""

from benchmarks.bars.training import conversion, data, model, quality, speed, state

BARS = [*model.BARS, *data.BARS, *state.BARS, *quality.BARS, *speed.BARS, *conversion.BARS]
