"""The fixture that compares providers, and the tables at the end: one per verb, with the ceilings measured in the same run."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from benchmarks import machine, timing

SECONDS = 1.2  # of one comparison, all providers together
ROUNDS = (3, 15)  # at least, at most
SLOW = 1.5  # seconds; a provider whose first call takes longer is not called again


def pytest_configure(config):
    config.option.benchmark_quiet = True  # its table is of whole rounds; ours has the providers apart


@dataclass(frozen=True)
class Provider:
    """One way to compute a verb. preallocated: outputs are given, fresh memory is not part of the time. work: what differs from
    the comparison's (bytes of another format)."""

    call: Callable[[], object]
    preallocated: bool = False
    work: float | None = None


@dataclass(frozen=True)
class Line:
    verb: str
    shape: str
    provider: str
    preallocated: bool
    seconds: float
    work: float  # bytes read and written, or floating-point operations
    ceiling: str  # attribute of Ceilings


class Ceilings:
    """What this machine does at most, measured when first asked for, with the threads that the providers use."""

    @cached_property
    def memcpy(self) -> float:
        """Bytes/s, read and written, of copying 128 MiB."""
        x = torch.randn(2**25)
        y = torch.empty_like(x)
        return 2 * x.nbytes / min(timing.interleaved({"copy": lambda: y.copy_(x)}, 9)["copy"])

    @cached_property
    def bf16(self) -> float:
        """Operations/s of torch's BF16 matrix product of 2048 x 2048 x 2048."""
        return self._matmul(torch.bfloat16)

    @cached_property
    def fp32(self) -> float:
        return self._matmul(torch.float32)

    def _matmul(self, dtype: torch.dtype) -> float:
        n = 2048
        a, b, c = (torch.randn(n, n).to(dtype) for _ in range(3))
        return 2 * n**3 / min(timing.interleaved({"mm": lambda: torch.mm(a, b, out=c)}, 5)["mm"])


LINES = pytest.StashKey[list]()
CEILINGS = pytest.StashKey[Ceilings]()
OTHERS = pytest.StashKey[float]()  # cores that other processes used before the first comparison


@pytest.fixture
def compare(benchmark, request):
    """compare(verb, shape, {name: Provider or callable}, bytes=... | flops=..., ceiling="bf16"): providers take turns, the table
    shows the median of each."""

    def run(verb, shape, providers, *, bytes: float | None = None, flops: float | None = None, ceiling: str = "bf16"):
        providers = {name: p if isinstance(p, Provider) else Provider(p) for name, p in providers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in providers}

        def one_round(names):
            for name in names:
                seconds[name].append(timing.once(providers[name].call))

        one_round(providers)
        repeated = [name for name, times in seconds.items() if times[0] < SLOW]
        one_round(repeated)  # the first round warmed up caches, pools and workspaces; this one says how many there is time for
        least, most = ROUNDS
        rounds = min(most, max(least, int(SECONDS / max(1e-9, sum(seconds[name][1] for name in repeated)))))
        for name in repeated:
            seconds[name].clear()
        benchmark.pedantic(one_round, (repeated,), rounds=rounds, iterations=1)
        lines = request.config.stash.setdefault(LINES, [])
        for name, times in seconds.items():
            work = providers[name].work or (bytes if bytes is not None else flops)
            kind = "memcpy" if bytes is not None else ceiling
            lines.append(Line(verb, shape, name, providers[name].preallocated, statistics.median(times), work, kind))
            benchmark.extra_info[name] = statistics.median(times)

    stash = request.config.stash
    if CEILINGS not in stash:
        stash[OTHERS] = machine.cores_used_by_others()
        stash[CEILINGS] = Ceilings()
    return run


def pytest_terminal_summary(terminalreporter, config):
    lines = config.stash.get(LINES, [])
    if not lines:
        return
    ceilings = config.stash[CEILINGS]
    write = terminalreporter.write_line
    write(f"\n{machine.describe()}, {torch.get_num_threads()} threads, torch {torch.__version__}, commit {machine.commit()}")
    used = {line.ceiling for line in lines}
    parts = [("memcpy", "memcpy {:.1f} GB/s"), ("bf16", "BF16 matrix product {:.0f} GFLOP/s"), ("fp32", "FP32 {:.0f} GFLOP/s")]
    write("ceilings, same run: " + ", ".join(text.format(getattr(ceilings, name) / 1e9) for name, text in parts if name in used))
    others = max(config.stash[OTHERS], machine.cores_used_by_others())
    if others > machine.MAX_OTHERS:
        write(f"other processes used {others:.1f} cores before or after: these numbers say little")
    for verb in dict.fromkeys(line.verb for line in lines):
        write(f"\n{verb}")
        write(table([line for line in lines if line.verb == verb], ceilings))


def table(lines: list[Line], ceilings: Ceilings) -> str:
    """Shape, provider, median, rate, per cent of the ceiling, preallocated."""
    unit = "GB/s" if lines[0].ceiling == "memcpy" else "GFLOP/s"
    rows = [("shape", "provider", "median ms", unit, "% of ceiling", "preallocated")]
    for line in lines:
        rate = line.work / line.seconds
        share = 100 * rate / getattr(ceilings, line.ceiling)
        cells = line.shape, line.provider, f"{1e3 * line.seconds:.3f}", f"{rate / 1e9:.1f}", f"{share:.0f}"
        rows.append((*cells, "yes" if line.preallocated else "no"))
    widths = [max(len(row[c]) for row in rows) for c in range(6)]
    aligned = [[cell.ljust(w) if c < 2 or c == 5 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))]
               for row in rows]  # fmt: skip
    return "\n".join("  ".join(row).rstrip() for row in aligned)
