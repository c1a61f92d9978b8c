"""Bars of the core: bits, errors and invariances of the verbs and of the layer, the tiny model, the demo, and speed."""

from benchmarks.bars.core import bits, gemm, layer, programs, speed

BARS = [*bits.BARS, *gemm.BARS, *layer.BARS, *programs.PARITY, *speed.BARS, *programs.DEMO, *programs.SUITE]
