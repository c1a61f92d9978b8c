"""What this machine does at most, measured in the same rounds as what is compared with it: its speed changes within seconds.

Probes of the core (csrc/host/ceilings.h) on the best instruction set and torch's number of threads, as large as the work compared.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import timing
from mxmoe import _C


@dataclass(frozen=True)
class Ceiling:
    """A call that moves `work` bytes (read and written), or does `work` floating-point operations, and nothing else."""

    call: Callable[[], object]
    work: float


def copy_roof(work: float) -> dict[str, Ceiling]:
    """Copies that read and write `work` bytes together: memcpy, and stores past the cache. The roof is the faster one."""
    size = max(1, int(work) // 2)
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def copy(stream: bool):
        _C.copy_bytes(target, source, size, stream, "auto", torch.get_num_threads())

    return {"memcpy": Ceiling(lambda: copy(False), 2 * size), "streaming copy": Ceiling(lambda: copy(True), 2 * size)}


def read_roof(work: float, source: torch.Tensor) -> dict[str, Ceiling]:
    """Reads of `work` bytes, each from another place of `source` (uint8, larger than any cache)."""
    size, start = int(work), 0

    def read():
        nonlocal start
        if start + size > source.shape[0]:
            start = 0
        _C.read_bytes(source[start:], size, "auto", torch.get_num_threads())
        start += size

    return {"read": Ceiling(read, size)}


def peak(flops: float, isa: str = "auto") -> dict[str, Ceiling]:
    """About `flops` operations in registers: of BF16 pairs (vdpbf16ps) with AVX-512, else of FP32."""
    bf16 = (_C.default_isa() if isa == "auto" else isa) == "avx512"
    threads = torch.get_num_threads()
    each = _C.multiply_add(bf16, 1000, isa, threads) / 1000
    steps = max(1, int(flops / each))
    return {"peak": Ceiling(lambda: _C.multiply_add(bf16, steps, isa, threads), _C.multiply_add(bf16, steps, isa, threads))}


def rates(seconds: dict[str, list[float]], roof: dict[str, Ceiling]) -> list[float]:
    """The roof's rate in each round: that of its fastest call."""
    return [max(ceiling.work / seconds[name][i] for name, ceiling in roof.items()) for i in range(len(seconds[next(iter(roof))]))]


def share(call: Callable[[], object], work: float, roof: dict[str, Ceiling], repeats: int) -> float:
    """Median over the rounds of the call's rate (work per second) over the roof's in the same round."""
    seconds = timing.interleaved({"call": call} | {name: ceiling.call for name, ceiling in roof.items()}, repeats, warmup=2)
    return statistics.median(work / s / rate for s, rate in zip(seconds["call"], rates(seconds, roof), strict=True))
