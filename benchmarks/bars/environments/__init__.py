"""Sandboxes, what schedules them, and what guards their way out."""

from benchmarks.bars.environments import egress, sandboxes, scheduler

BARS = [*sandboxes.BARS, *scheduler.BARS, *egress.BARS]
