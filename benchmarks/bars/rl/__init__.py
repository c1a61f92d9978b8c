"""Bars of the asynchronous loop's parts: weights on their way, sampler against learner, the reconciler."""

from benchmarks.bars.rl import loop, parity, reconciler, runs, weights

BARS = [*runs.BARS, *loop.BARS, *weights.BARS, *parity.BARS, *reconciler.BARS]
