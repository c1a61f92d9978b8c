"""Measures one comparison: providers and ceilings take turns, in another order each round.

A provider's share of the roof is the median of the rounds' own ratios to min(peak, intensity x memory bandwidth), the roofline; of
the bandwidth alone for verbs without products. The bandwidth is that of the faster of memcpy and a copy past the cache: what stays
in a cache may pass it.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from benchmarks import timing
from benchmarks.ceilings import copy_roof, peak, rates

SECONDS = 2.0  # of the rounds of one comparison
ROUNDS = (3, 15)  # at least, at most
SLOW = 6.0  # seconds; a provider whose first call takes longer is not called again
PROBE_BYTES, PROBE_FLOPS = 2**27, 1e10  # that a ceiling's call moves or does: beyond any cache, some milliseconds


@dataclass(frozen=True)
class Provider:
    """One way to do it. bytes: that it must at least read and write; preallocated: its outputs are given; note: asked for at the
    end, says more."""

    call: Callable[[], object]
    bytes: float
    preallocated: bool = False
    note: Callable[[], str] | None = None


@dataclass(frozen=True)
class Comparison:
    """What is compared; `build` makes inputs and providers, a string instead of one says why it is left out."""

    verb: str
    shape: str
    tokens: int
    routing: str
    flops: float  # of the products; 0 for a verb that moves data
    build: Callable[[], dict[str, Provider | str]] = field(compare=False)

    @property
    def title(self) -> str:
        return f"{self.verb}, {self.shape}, T {self.tokens}, {self.routing}"


@dataclass(frozen=True)
class Row:
    """One line of benchmarks/results/scoreboard.json."""

    verb: str
    shape: str
    tokens: int
    routing: str
    provider: str
    seconds: float | None  # median
    rounds: int
    flops: float
    bytes: float
    share: float | None  # of the roof
    preallocated: bool
    note: str = ""

    def stored(self) -> dict:
        return asdict(self)


@dataclass
class Roofs:
    """Medians of what the ceilings reached, in all comparisons: per second."""

    bytes: list[float] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)

    def stored(self) -> dict:
        return {name: statistics.median(v) if v else None for name, v in vars(self).items()}


def measure(c: Comparison, roofs: Roofs, seconds: float = SECONDS) -> list[Row]:
    providers = c.build()
    notes = {name: p for name, p in providers.items() if isinstance(p, str)}
    present = {name: p for name, p in providers.items() if name not in notes}
    slow: dict[str, float] = {}
    for name, p in present.items():
        try:
            first = _first(p.call)
        except (RuntimeError, ValueError, AssertionError) as error:
            notes[name] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            continue
        if first > SLOW:
            slow[name], notes[name] = first, "one call"
    memory, compute = copy_roof(PROBE_BYTES), peak(PROBE_FLOPS) if c.flops else {}
    repeated = {name: p.call for name, p in present.items() if name not in notes}
    taken = _rounds(repeated | {name: roof.call for name, roof in (memory | compute).items()}, seconds)
    bandwidth, peaks = rates(taken, memory), rates(taken, compute) if compute else []
    roofs.bytes += bandwidth
    roofs.flops += peaks

    def row(name: str) -> Row:
        p, times = present.get(name), taken.get(name) or ([slow[name]] if name in slow else [])
        key = (c.verb, c.shape, c.tokens, c.routing, name)
        if not times:
            return Row(*key, None, 0, c.flops, p.bytes if p else 0.0, None, False, notes[name])
        at_roof = [max(p.bytes / bandwidth[i], c.flops / peaks[i] if peaks else 0.0) for i in range(len(times))]
        share = statistics.median(best / s for best, s in zip(at_roof, times, strict=True)) if any(at_roof) else None
        note = p.note() if p.note else notes.get(name, "")
        return Row(*key, statistics.median(times), len(times), c.flops, p.bytes, share, p.preallocated, note)

    return [row(name) for name in providers]


def _first(call: Callable[[], object]) -> float:
    """Seconds of the first call, which warms up caches, pools and workspaces; of the second where the first was slow, but may only
    have compiled or imported."""
    seconds = timing.once(call)
    return timing.once(call) if SLOW < seconds < 4 * SLOW else seconds


def left_out(c: Comparison, why: str) -> list[Row]:
    return [Row(c.verb, c.shape, c.tokens, c.routing, "", None, 0, c.flops, 0.0, None, False, why)]


def _rounds(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """At most ROUNDS[1] rounds, until the time is over and ROUNDS[0] were made; fewer where these would take long."""
    order, taken, start = random.Random(0), {name: [] for name in calls}, time.monotonic()
    least, most = ROUNDS
    for i in range(most):
        for name in order.sample(list(calls), len(calls)):
            taken[name].append(timing.once(calls[name]))
        spent = time.monotonic() - start
        if spent > (seconds if i + 1 >= least else 4 * seconds):
            break
    return taken
