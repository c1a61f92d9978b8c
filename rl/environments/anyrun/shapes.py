"""What an environment needs and what a node has: four whole numbers, so that sums of them come back to exactly zero.

    cpu      thousandths of a core        memory, disk   MiB        pids   processes and threads

A start costs more than the running environment does (package managers, imports, page faults), so a shape has two vectors: `peak` is
reserved from the placement until the environment answers, `steady` from then on.
"""

from dataclasses import dataclass, fields

MIB = 2**20
MOST = 2**40  # of any resource: sums over all environments fit into 64 bits


@dataclass(frozen=True, order=True)
class Resources:
    """A vector over the four resources. `Resources(cpu=500, memory=256)` is half a core and 256 MiB."""

    cpu: int = 0
    memory: int = 0
    disk: int = 0
    pids: int = 0

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 0 <= value <= MOST:
                raise ValueError(f"{field.name} must be a whole number >= 0 and at most 2**40, got {str(value)[:40]!r}")

    def __iter__(self):
        return iter((self.cpu, self.memory, self.disk, self.pids))

    def fits(self, other: "Resources") -> bool:
        """Whether this much fits into `other`."""
        return all(mine <= theirs for mine, theirs in zip(self, other, strict=True))


RESOURCES = tuple(field.name for field in fields(Resources))


def vector(amounts) -> Resources:
    """Of four numbers from somewhere else; ValueError of more, fewer or others."""
    return Resources(**dict(zip(RESOURCES, amounts, strict=True)))


@dataclass(frozen=True)
class Shape:
    """A kind of environment: its image, what it needs once it runs, and what its start needs (never less)."""

    image: str
    steady: Resources
    peak: Resources | None = None

    def __post_init__(self):
        peak = self.peak or self.steady
        if not self.steady.fits(peak):
            raise ValueError(f"peak must be at least steady in every resource, got {peak} and {self.steady}")
        object.__setattr__(self, "peak", peak)


@dataclass(frozen=True)
class Quota:
    """What one tenant may have at once, and how fast it may ask. The rest of its requests wait in its own queue."""

    environments: int = 1_000_000
    resources: Resources | None = None  # of the sum of `steady`; None: no limit
    creates_per_s: float = 1_000.0
    burst: int = 1_000  # creates at once after a pause
    queue: int = 100_000  # waiting requests; more are refused
