"""Tenants: what each uses of its quota, and its waiting requests: a queue per shape, so that one without room blocks no other."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from rl.environments.anyrun.shapes import RESOURCES, Quota

POOL = 0  # the tenant that owns warm environments


@dataclass
class Tenant:
    name: str
    quota: Quota
    count: int = 0  # environments that hold something on a node
    used_R: list[int] = field(default_factory=lambda: [0] * len(RESOURCES))
    waiting: int = 0  # queued requests
    queues: OrderedDict[int, deque[int]] = field(default_factory=OrderedDict)  # shape -> ids, some of which have ended since
    bucket: float = float("-inf")  # virtual-scheduling token bucket

    def may(self, steady_R, now: float) -> bool:
        """Whether one more environment is within the quota now."""
        quota = self.quota
        if self.count >= quota.environments or self.bucket > now + (quota.burst - 1) / quota.creates_per_s:
            return False
        limit = quota.resources
        return limit is None or all(u + s <= most for u, s, most in zip(self.used_R, steady_R, limit, strict=True))

    def take(self, steady_R, now: float):
        self.count += 1
        self.used_R = [u + s for u, s in zip(self.used_R, steady_R, strict=True)]
        self.bucket = max(self.bucket, now) + 1.0 / self.quota.creates_per_s

    def give(self, steady_R):
        self.count -= 1
        self.used_R = [u - s for u, s in zip(self.used_R, steady_R, strict=True)]
