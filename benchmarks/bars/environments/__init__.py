"""Sandboxes, and what schedules and guards them."""

from benchmarks.bars.environments import sandboxes

BARS = [*sandboxes.BARS]
