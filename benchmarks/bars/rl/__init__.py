"""Bars of the asynchronous loop's parts: weights on their way, sampler against learner, the reconciler."""

from benchmarks.bars.rl import parity, reconciler, weights

BARS = [*weights.BARS, *parity.BARS, *reconciler.BARS]
