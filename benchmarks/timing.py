"""Interleaved timing: providers take turns, so that a machine that slows down slows all of them; medians are compared."""

import random
import statistics
import time
from collections.abc import Callable

PAUSE = 0.006  # seconds before each call: until torch's OpenMP threads stop spinning, they slow whoever comes next


def once(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    time.sleep(PAUSE)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(providers: dict[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of every call, by provider, in the order of the rounds; the warm-up rounds are not counted. Each round has an order
    of its own (seeded), so that nobody always follows the same neighbour."""
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in providers}
    for i in range(warmup + repeats):
        for name in order.sample(list(providers), len(providers)):
            elapsed = once(providers[name])
            if i >= warmup:
                seconds[name].append(elapsed)
    return seconds


def medians(providers: dict[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in interleaved(providers, repeats, warmup).items()}


def speedup(ours: Callable[[], object], peer: Callable[[], object], repeats: int, warmup: int = 1) -> float:
    """Median time of the peer over ours, of interleaved pairs: above 1 where ours is faster."""
    times = medians({"ours": ours, "peer": peer}, repeats, warmup)
    return times["peer"] / times["ours"]
