"""Bars of the GPU kernels: conformance and mutants under the interpreter, what nvcc makes of them, and what a GPU measures."""

from benchmarks.bars.gpu import device, interpreter

BARS = [*interpreter.BARS, *device.BARS]
