"""A cluster in virtual time: the real scheduler over nodes whose delays were measured, for 100,000 environments and more.

Nodes start an environment in a log-normal time whose median grows with how many are alive there (5.4 ms, and 3 times more per
3,000 alive; 99th percentile 3.3 medians), after fetching an image they lack (new nodes only: the first have all). These were
measured on one 2-core machine with a launcher of namespaces; more cores slow down as much later. Lifetimes, the mix of shapes and
live use are assumptions, named in `Plan` and `MIX`.

Only calls of the scheduler are timed, as CPU time of one core (`placements_per_s` is per second of those). Latencies are those of
one server: a request waits until the scheduler has finished what came before, at the plan's arrival times, and then for its own.
"""

import heapq
import math
import random
import resource
import time
from dataclasses import asdict, dataclass, field

import numpy as np

from rl.environments.anyrun.nodes import GONE
from rl.environments.anyrun.scheduler import Config, Ended, Ready, Scheduler, Start, Stop
from rl.environments.anyrun.shapes import Quota, Resources, Shape

START_S, START_SPREAD, SLOWDOWN, MEASURED_CORES = 5.4e-3, 0.507, 3.0 / 3000, 2
STOP_S = 3e-3  # kill, reap and remove the layer
MIX = {  # (steady, peak, weight): verification in Python, a service with its tests, JavaScript, a compiler
    "python": (Resources(250, 256, 512, 32), Resources(1000, 512, 768, 64), 55),
    "service": (Resources(500, 512, 1024, 64), Resources(1500, 1024, 1536, 128), 25),
    "node": (Resources(500, 1024, 2048, 96), Resources(2000, 1536, 3072, 192), 15),
    "compiler": (Resources(2000, 2048, 4096, 128), Resources(4000, 4096, 6144, 256), 5),
}


@dataclass(frozen=True)
class Plan:
    environments: int = 100_000  # alive at once
    churn_s: float = 30.0  # virtual time at that number
    fill_per_s: float = 2_000.0  # creates until then
    lifetime_s: float = 600.0  # mean, log-normal with spread 1
    lease_s: float = 120.0
    images: int = 40  # spread over the shapes of MIX
    image_s: float = 5.0  # to fetch one
    node: Resources = Resources(192_000, 1 << 20, 8 << 20, 1 << 18)  # noqa: RUF009 (frozen): 192 cores, 1 TiB, 8 TiB
    spare: float = 0.1  # nodes beyond what the environments need
    report_s: float = 2.0
    losses: int = 2  # nodes lost during the churn
    tick_s: float = 0.02
    tenants: int = 8
    seed: int = 0


@dataclass
class Result:
    placements: int = 0
    placements_per_s: float = 0.0  # per second of the scheduler's own time, all its events included
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    busy: float = 0.0  # of one core during the churn
    nodes: int = 0
    packed: float = 0.0  # nodes in use after filling / the least that could hold the same environments
    packed_churned: float = 0.0  # the same after the churn
    alive: int = 0
    lost: int = 0  # environments, with their nodes
    wait_p99_s: float = 0.0  # create to ready, virtual
    memory_mib: float = 0.0  # of the whole process, at its largest
    ended: dict[str, int] = field(default_factory=dict)


def shapes(plan: Plan) -> tuple[list[Shape], list[int]]:
    """Shapes over the plan's images and their weights."""
    made, weights = [], []
    for i in range(plan.images):
        steady, peak, weight = list(MIX.values())[i % len(MIX)]
        made.append(Shape(f"image{i}", steady, peak))
        weights.append(weight)
    return made, weights


def least_nodes(total_R: np.ndarray, capacity_R: np.ndarray) -> int:
    """No fewer equal nodes can hold this much: the worst single resource."""
    return max(1, math.ceil((total_R / capacity_R).max()))


class Simulation:
    def __init__(self, plan: Plan, config: Config | None = None, progress=None):
        self.plan, self.random, self.progress = plan, random.Random(plan.seed), progress
        self.scheduler = Scheduler(config or Config(creates_per_s=400.0, burst=100))
        self.shapes, self.weights = shapes(plan)
        self.events: list[tuple] = []  # (time, order, handler, argument)
        self.order = 0
        self.now = self.busy_until = self.spent = 0.0
        self.filled = plan.environments / plan.fill_per_s + plan.image_s + 5.0  # nothing ends before
        self.renewed = 0
        self.latencies: list[float] = []
        self.waits: list[float] = []
        self.asked: dict[int, float] = {}
        self.images: dict[str, dict[str, float]] = {}  # node -> image -> when it is there
        self.placed: dict[str, set[int]] = {}
        self.alive: list[int] = []  # environments, in any order; for renewals
        self.place: dict[int, int] = {}  # environment -> index in alive
        self.result = Result()
        steady_R = sum(np.array([*s.steady]) * w for s, w in zip(self.shapes, self.weights, strict=True)) / sum(self.weights)
        limits = (np.array(self.scheduler.config.overcommit), np.array(self.scheduler.config.pressure))
        self.usable_R = np.minimum(limits[0], limits[1] * np.array([np.inf, 1, 1, 1])) * np.array([*plan.node])
        count = math.ceil(least_nodes(steady_R * plan.environments, self.usable_R) * (1 + plan.spare)) + plan.losses
        for i in range(count):
            self.join(f"n{i}")
        for tenant in range(plan.tenants):
            self.scheduler.set_quota(f"t{tenant}", Quota(creates_per_s=1e6, burst=10_000))
        self.result.nodes = count

    def at(self, when: float, handler, argument=None):
        self.order += 1
        heapq.heappush(self.events, (when, self.order, handler, argument))

    def join(self, name: str):
        self.images[name], self.placed[name] = {shape.image: 0.0 for shape in self.shapes if not self.now}, set()
        self.scheduler.add_node(name, self.plan.node, self.now)
        self.at(self.now + self.random.random() * self.plan.report_s, self.report, name)

    def call(self, method, *arguments):
        """A timed call of the scheduler; then its decisions are carried out."""
        began = time.thread_time()
        value = method(*arguments)
        took = time.thread_time() - began
        self.spent += took
        self.busy_until = max(self.busy_until, self.now) + took
        for decision in self.scheduler.take():
            match decision:
                case Start():
                    self.start(decision)
                case Stop(placement, node):
                    self.at(self.now + STOP_S, self.stopped, (placement, node))
                case Ready(env):
                    self.waits.append(self.now - self.asked.pop(env))
                    self.place[env] = len(self.alive)
                    self.alive.append(env)
                    self.at(max(self.now, self.filled) + self.lifetime(), self.destroy, env)
                case Ended(env, reason):
                    self.forget(env)
                    self.result.ended[reason] = self.result.ended.get(reason, 0) + 1
        return value

    def lifetime(self) -> float:
        return self.random.lognormvariate(math.log(self.plan.lifetime_s) - 0.5, 1.0)

    def forget(self, env: int):
        self.asked.pop(env, None)
        index = self.place.pop(env, None)
        if index is not None:
            last = self.alive.pop()
            if last != env:
                self.alive[index], self.place[last] = last, index

    def start(self, start: Start):
        if start.node not in self.placed:
            return
        placed, images = self.placed[start.node], self.images[start.node]
        placed.add(start.placement)
        there = images.setdefault(start.shape.image, self.now + self.plan.image_s)
        alike = len(placed) * MEASURED_CORES * 1000 / self.plan.node.cpu  # as many would slow the measured machine
        median = START_S * (1 + SLOWDOWN * alike)
        delay = self.random.lognormvariate(math.log(median), START_SPREAD)
        self.at(max(self.now, there) + delay, self.started, (start.placement, start.node))

    # Events

    def create(self, number: int):
        shape = self.random.choices(self.shapes, self.weights)[0]
        before = self.now
        env = self.call(self.create_now, f"t{number % self.plan.tenants}", str(number), shape)
        if self.scheduler.state(env) == "starting":
            self.latencies.append(self.busy_until - before)

    def create_now(self, tenant: str, key: str, shape: Shape) -> int:
        env = self.scheduler.create(tenant, key, shape, self.plan.lease_s, self.now)
        self.asked[env] = self.now
        return env

    def started(self, argument):
        placement, node = argument
        if node in self.placed:
            self.call(self.scheduler.started, placement, self.now)

    def stopped(self, argument):
        placement, node = argument
        if node in self.placed:
            self.placed[node].discard(placement)
            self.call(self.scheduler.stopped, placement, self.now)

    def destroy(self, env: int):
        if env in self.place:
            self.call(self.scheduler.destroy, env, self.now)

    def report(self, node: str):
        if node not in self.placed:
            return
        full = self.random.random() < self.plan.report_s / 30
        number = self.scheduler.nodes.number[node]
        live = (self.scheduler.nodes.reserved_RN[:, number] * np.array([0.1, 0.9, 0.6, 0.6])).astype(int).tolist()
        self.call(self.scheduler.report, node, self.now, Resources(*live), self.placed[node] if full else None)
        self.at(self.now + self.plan.report_s, self.report, node)

    def lose(self, _):
        node = self.random.choice(list(self.placed))
        before = len(self.alive)
        del self.placed[node], self.images[node]
        self.call(self.scheduler.lose, node, self.now)
        self.result.lost += before - len(self.alive)

    def tick(self, _):
        """Every environment is renewed about three times a lease; then the scheduler's tick."""
        for _ in range(int(len(self.alive) * self.plan.tick_s * 3 / self.plan.lease_s)):
            self.renewed += 1
            self.call(self.scheduler.renew, self.alive[self.renewed % len(self.alive)], self.plan.lease_s, self.now)
        self.call(self.scheduler.tick, self.now)
        self.at(self.now + self.plan.tick_s, self.tick)

    # The run

    def until(self, end: float, arrivals_per_s: float, first: int, last: float = math.inf) -> int:
        """Runs to a time, with Poisson arrivals of requests numbered up to `last`; the next request's number."""
        number, arrival = first, self.now + self.random.expovariate(arrivals_per_s)
        while min(arrival, self.events[0][0]) < end:
            if arrival <= self.events[0][0]:
                self.now = arrival
                self.create(number)
                number += 1
                arrival = self.now + self.random.expovariate(arrivals_per_s) if number < last else math.inf
                if self.progress is not None:
                    self.progress.update()
            else:
                self.now, _, handler, argument = heapq.heappop(self.events)
                handler(argument)
        self.now = end
        return number

    def packed(self) -> float:
        nodes = self.scheduler.nodes
        n = len(nodes)
        used = int(((nodes.count_N[:n] > 0) & (nodes.state_N[:n] != GONE)).sum())
        return used / least_nodes(nodes.reserved_RN[:, :n].sum(1), self.usable_R)

    def run(self) -> Result:
        plan, result = self.plan, self.result
        self.at(0.0, self.tick)
        number = self.until(self.filled, plan.fill_per_s, 0, plan.environments)
        result.packed = self.packed()
        self.latencies.clear()
        began, spent = self.now, self.spent
        for _ in range(plan.losses):
            self.at(self.now + self.random.random() * plan.churn_s, self.lose)
        rate = plan.environments / plan.lifetime_s
        self.until(self.now + plan.churn_s, rate, number)
        latencies = np.sort(self.latencies) * 1e3
        result.placements = self.scheduler.placements
        result.placements_per_s = result.placements / self.spent
        result.p50_ms, result.p99_ms, result.max_ms = (float(np.quantile(latencies, q)) for q in (0.5, 0.99, 1.0))
        result.busy = (self.spent - spent) / (self.now - began)
        result.packed_churned = self.packed()
        result.alive = len(self.alive)
        result.wait_p99_s = float(np.quantile(self.waits, 0.99))
        result.memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return result


def simulate(plan: Plan, config: Config | None = None, progress=None) -> dict:
    """Runs a plan; its numbers by name."""
    return asdict(Simulation(plan, config, progress).run())
