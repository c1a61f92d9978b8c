"""The fixture that compares providers, and the tables at the end: one per verb, with the ceilings measured in the same run."""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from benchmarks import machine, timing

SECONDS = 1.2  # of one comparison, all providers together
ROUNDS = (5, 15)  # at least, at most
SLOW = 1.5  # seconds; a provider that takes longer in the first round after the warm-up is not called again


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
    seconds: float  # median
    rounds: int
    work: float  # bytes read and written, or floating-point operations
    kind: str  # of work: "bytes" or "flops", the ceiling it has in Ceilings


UNITS = {"bytes": "GB/s", "flops": "GFLOP/s"}


class Ceilings:
    """What this machine does at most, measured when first asked for, with the threads that the providers use."""

    @cached_property
    def bytes(self) -> float:
        """Per second, read and written, of copying 128 MiB."""
        x = torch.randn(2**25)
        y = torch.empty_like(x)
        return 2 * x.nbytes / min(timing.interleaved({"copy": lambda: y.copy_(x)}, 9)["copy"])

    @cached_property
    def flops(self) -> float:
        """Per second, of torch's BF16 matrix product of 2048 x 2048 x 2048."""
        n = 2048
        a, b, c = (torch.randn(n, n).bfloat16() for _ in range(3))
        return 2 * n**3 / min(timing.interleaved({"mm": lambda: torch.mm(a, b, out=c)}, 5)["mm"])


LINES = pytest.StashKey[list]()
CEILINGS = pytest.StashKey[Ceilings]()
OTHERS = pytest.StashKey[float]()  # cores that other processes used before the first comparison


@pytest.fixture
def compare(benchmark, request):
    """compare(verb, shape, {name: Provider or callable}, bytes=... or flops=...): providers take turns, the table shows the
    median of each; so does the test's `extra_info`, with the bytes or flops."""

    def run(verb, shape, providers, **work: float):
        ((kind, amount),) = work.items()
        providers = {name: p if isinstance(p, Provider) else Provider(p) for name, p in providers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in providers}
        shuffled = random.Random(0)

        def one_round(names):
            for name in shuffled.sample(names, len(names)):  # so that nobody always follows the same neighbour
                seconds[name].append(timing.once(providers[name].call))

        for provider in providers.values():
            provider.call()  # warms up caches, pools and workspaces; imports and compiles
        one_round(list(providers))  # says how many there is time for
        repeated = [name for name, times in seconds.items() if times[0] < SLOW]
        least, most = ROUNDS
        rounds = min(most, max(least, int(SECONDS / max(1e-9, sum(seconds[name][0] for name in repeated)))))
        benchmark.pedantic(one_round, (repeated,), rounds=rounds - 1, iterations=1)
        lines = request.config.stash.setdefault(LINES, [])
        for name, times in seconds.items():
            provider = providers[name]
            work_done, median = provider.work or amount, statistics.median(times)
            line = Line(verb, shape, name, provider.preallocated, median, len(times), work_done, kind)
            lines.append(line)
            benchmark.extra_info[name] = {
                "seconds": line.seconds, "rounds": line.rounds, kind: line.work, "preallocated": line.preallocated
            }  # fmt: skip

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
    write(f"\n{machine.conditions()}")
    write(f"ceilings, same run: copy {ceilings.bytes / 1e9:.1f} GB/s, BF16 matrix product {ceilings.flops / 1e9:.0f} GFLOP/s")
    others = max(config.stash[OTHERS], machine.cores_used_by_others())
    if others > machine.MAX_OTHERS:
        write(f"other processes used {others:.1f} cores before or after: these numbers say little")
    for verb in dict.fromkeys(line.verb for line in lines):
        write(f"\n{verb}")
        write(table([line for line in lines if line.verb == verb], ceilings))


def table(lines: list[Line], ceilings: Ceilings) -> str:
    """Shape, provider, median, rounds, rate, per cent of the ceiling, preallocated."""
    rows = [("shape", "provider", "median ms", "rounds", UNITS[lines[0].kind], "% of ceiling", "preallocated")]
    for line in lines:
        rate = line.work / line.seconds
        share = 100 * rate / getattr(ceilings, line.kind)
        cells = line.shape, line.provider, f"{1e3 * line.seconds:.3f}", str(line.rounds), f"{rate / 1e9:.1f}", f"{share:.0f}"
        rows.append((*cells, "yes" if line.preallocated else "no"))
    widths = [max(len(row[c]) for row in rows) for c in range(7)]
    aligned = [[cell.ljust(w) if c < 2 or c == 6 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))]
               for row in rows]  # fmt: skip
    return "\n".join("  ".join(row).rstrip() for row in aligned)
