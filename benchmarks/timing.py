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


def ratio(above: Callable[[], object], below: Callable[[], object], repeats: int, warmup: int = 1) -> float:
    """Median over the rounds of the time of `above` over that of `below` in the same round."""
    times = interleaved({"above": above, "below": below}, repeats, warmup)
    return statistics.median(a / b for a, b in zip(times["above"], times["below"], strict=True))


def speedup(ours: Callable[[], object], peer: Callable[[], object], repeats: int, warmup: int = 1) -> float:
    """The peer's time over ours, of interleaved pairs: above 1 where ours is faster."""
    return ratio(peer, ours, repeats, warmup)


def fastest(calls: dict[str, Callable[[], object]]) -> str:
    """Name of the fastest: all are tried once; those within three times of the best three times more, in turn."""
    first = {name: once(call) for name, call in calls.items()}
    near = {name: calls[name] for name, seconds in first.items() if seconds < 3 * min(first.values())}
    if len(near) == 1:
        return next(iter(near))
    times = medians(near, 3, warmup=0)
    return min(times, key=times.get)
