"""The scheduler again, slow and obvious (plain objects, every sum made anew), for comparison; and a world of nodes that carry
decisions out and notice what must never happen."""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from rl.environments.anyrun.nodes import GONE
from rl.environments.anyrun.scheduler import Config, Ended, Ready, Refused, Scheduler, Start, Stop
from rl.environments.anyrun.shapes import Quota, Resources, Shape
from rl.environments.anyrun.table import QUEUED, RUNNING, STARTING, STOPPING
from rl.environments.anyrun.tenants import POOL


@dataclass
class Node:
    capacity: list[int]
    images: set[str]
    live: list[int]
    reports: int = 0
    number: int = 0  # the scheduler's: between equals the lowest is chosen
    rested: float = float("-inf")  # its token bucket
    failures: int = 0


@dataclass
class Env:
    id: int
    tenant: str
    shape: Shape
    lease_s: float
    deadline: float
    state: str = "queued"
    node: str | None = None
    placement: int | None = None
    seen: int = 0  # reports of the node when it was placed there
    attempts: int = 0
    number: int = field(default=0)  # for order in queues


class Model:
    """`create`, `started`, `failed`, `stopped`, `destroy`, `report`, `lose`, `tick` with the meaning of the scheduler's, without
    pools, forks and drains, for one tenant. `log` holds (kind, name, node) with requests by key and placements by order."""

    def __init__(self, config: Config, quota: Quota):
        self.config, self.quota = config, quota
        self.nodes: dict[str, Node] = {}
        self.envs: list[Env] = []
        self.log, self.placements, self.bucket, self.now = [], 0, float("-inf"), 0.0

    def join(self, name, capacity, number):
        self.nodes[name] = Node([*capacity], set(), [0] * 4, number=number)

    def held(self, node=None):
        return [env for env in self.envs if env.node is not None and node in (None, env.node)]

    def free(self, name):
        node, config = self.nodes[name], self.config
        promised, unseen = [0] * 4, [0] * 4
        for env in self.held(name):
            peak = env.state in ("starting", "stopping-start")
            for r, (most, steady) in enumerate(zip(env.shape.peak, env.shape.steady, strict=True)):
                promised[r] += most if peak else steady
                unseen[r] += steady * (env.seen == node.reports) + (most - steady) * peak
        return [
            min(int(config.overcommit[r] * c) - promised[r], int(config.pressure[r] * c) - node.live[r] - unseen[r])
            for r, c in enumerate(node.capacity)
        ]

    def place(self, env, now):
        config, quota = self.config, self.quota
        if len(self.held()) >= quota.environments or self.bucket > now + (quota.burst - 1) / quota.creates_per_s:
            return False
        best, best_room = None, None
        for name, node in sorted(self.nodes.items(), key=lambda item: item[1].number):
            free = self.free(name)
            if node.rested > now + (config.burst - 1) / config.creates_per_s or not env.shape.peak.fits(free):
                continue
            room = 0.0
            for f, p, c in zip(free, env.shape.peak, node.capacity, strict=True):
                room += (f - p) * (1.0 / max(1, c))
            room += 0.0 if env.shape.image in node.images else config.image_cost
            if best is None or room < best_room:
                best, best_room = name, room
        if best is None:
            return False
        self.placements += 1
        env.state, env.node, env.placement, env.deadline = "starting", best, self.placements, now + config.start_s
        env.attempts += 1
        node = self.nodes[best]
        env.seen = node.reports
        node.rested = max(node.rested, now) + 1.0 / config.creates_per_s
        self.bucket = max(self.bucket, now) + 1.0 / quota.creates_per_s
        self.log.append(("start", env.id, best))
        return True

    def waiting(self, shape):
        return sorted((env for env in self.envs if env.state == "queued" and env.shape == shape), key=lambda env: env.number)

    def create(self, key, shape, lease_s, now):
        env = Env(key, "t", shape, lease_s, now + self.config.queue_s, number=len(self.envs) + 1)
        behind = self.waiting(shape)
        self.envs.append(env)
        if not behind:
            self.place(env, now)

    def by(self, placement):
        return next((env for env in self.envs if placement and env.placement == placement), None)

    def end(self, env, reason):
        self.log.append(("ended", env.id, reason))
        if env.node is None:
            env.state = "gone"
        else:
            self.log.append(("stop", env.placement, env.node))
            env.state = "stopping-start" if env.state == "starting" else "stopping"
            env.deadline = self.now + self.config.stop_s

    def started(self, placement, now):
        self.now = now
        env = self.by(placement)
        if env and env.state == "starting":
            env.state, env.deadline = "running", now + env.lease_s
            self.nodes[env.node].images.add(env.shape.image)
            self.nodes[env.node].failures = 0
            self.log.append(("ready", env.id, env.node))

    def stopped(self, placement, now):
        self.now = now
        env = self.by(placement)
        if env:
            ended = env.state.startswith("stopping")
            env.node = env.placement = None
            if ended:
                env.state = "gone"
            else:
                self.end(env, "died")

    def destroy(self, key, now):
        self.now = now
        env = next((env for env in self.envs if env.id == key), None)
        if env and env.state in ("queued", "starting", "running"):
            self.end(env, "destroyed")

    def report(self, name, now, live):
        self.nodes[name].live = [*live]
        self.nodes[name].reports += 1

    def again(self, env, reason):
        """A start came to nothing."""
        env.node = env.placement = None
        if env.attempts < self.config.attempts:
            env.state, env.deadline = "queued", self.now + self.config.queue_s
            env.number = min([0, *(e.number for e in self.envs)]) - 1
        else:
            self.end(env, reason)

    def failed(self, placement, now):
        self.now = now
        env = self.by(placement)
        if env and env.state == "starting":
            node = self.nodes[env.node]
            node.failures += 1
            node.rested = now + (self.config.burst - 1) / self.config.creates_per_s + min(60.0, 2.0**node.failures / 4)
            self.again(env, "start failed: broken")
        else:
            self.stopped(placement, now)

    def lose(self, name, now):
        self.now = now
        for env in sorted(self.held(name), key=lambda env: -env.id):
            if env.state == "starting":
                self.again(env, "node lost")
                continue
            env.node = env.placement = None
            if env.state.startswith("stopping"):
                env.state = "gone"
            else:
                self.end(env, "node lost")
        del self.nodes[name]

    def tick(self, now, shapes):
        """`shapes`: the queues in the scheduler's order of service (its fairness among shapes is tested by itself)."""
        self.now = now
        for env in sorted(self.envs, key=lambda env: env.id):
            if env.state != "gone" and env.deadline <= now:
                if env.state.startswith("stopping"):
                    self.log.append(("stop", env.placement, env.node))
                    env.deadline = now + self.config.stop_s
                else:
                    self.end(env, {"queued": "queue timeout", "starting": "start timeout", "running": "lease expired"}[env.state])
        order, full = list(shapes), set()
        placed = True
        while placed:
            placed = False
            for shape in list(order):
                queue = self.waiting(shape)
                if queue and shape not in full:
                    if self.place(queue[0], now):
                        order.remove(shape)
                        order.append(shape)
                        placed = True
                        break
                    if not self.over_quota(now):
                        full.add(shape)

    def over_quota(self, now):
        quota = self.quota
        return len(self.held()) >= quota.environments or self.bucket > now + (quota.burst - 1) / quota.creates_per_s


def check(scheduler: Scheduler):
    """Every sum the scheduler keeps, against the table; and that no slot, key or placement is left over."""
    table, nodes = scheduler.table, scheduler.nodes
    reserved, starting, count = np.zeros_like(nodes.reserved_RN), np.zeros_like(nodes.starting_RN), np.zeros_like(nodes.count_N)
    unseen, held = np.zeros_like(reserved), Counter()
    used = {number: np.zeros(4, np.int64) for number in range(len(scheduler.tenants))}
    waiting = Counter()
    for slot in np.flatnonzero(table.state[: table.end]).tolist():
        state, tenant, node = table.state[slot], int(table.tenant[slot]), int(table.node[slot])
        steady, peak = scheduler.steady_SR[table.shape[slot]], scheduler.peak_SR[table.shape[slot]]
        assert table.slot(int(table.id[slot])) == slot
        if state == QUEUED:
            assert table.placement[slot] == node == -1
            waiting[tenant] += 1
            continue
        assert state in (STARTING, RUNNING, STOPPING)
        assert scheduler.slot_of[int(table.placement[slot])] == slot
        assert nodes.state_N[node] != GONE
        assert table.peak[slot] or state != STARTING
        reserved[:, node] += steady
        starting[:, node] += (peak - steady) * table.peak[slot]
        unseen[:, node] += steady * (table.reports[slot] == nodes.reports_N[node]) + (peak - steady) * table.peak[slot]
        count[node] += 1
        held[tenant] += 1
        used[tenant] += steady
    assert len(scheduler.slot_of) == sum(held.values())
    np.testing.assert_array_equal(nodes.reserved_RN, reserved)
    np.testing.assert_array_equal(nodes.starting_RN, starting)
    np.testing.assert_array_equal(nodes.count_N, count)
    np.testing.assert_array_equal(nodes.unseen_RN, unseen)
    assert (reserved + starting <= nodes.promise_RN).all()
    for number, who in enumerate(scheduler.tenants):
        assert (who.count, who.waiting) == (held[number], waiting[number])
        assert who.used_R == used[number].tolist()
        assert who.count <= who.quota.environments or number == POOL
    assert len(table) + len(table.unused) == len(table.state) == len(table.key)
    assert len(set(table.unused)) == len(table.unused)
    for shape, slots in scheduler.warm.items():
        assert all(table.state[slot] == RUNNING and table.tenant[slot] == POOL and table.shape[slot] == shape for slot in slots)


class World:
    """Nodes that run placements, as the decisions say; asserts that none runs twice and that clients hear of every end once."""

    def __init__(self, scheduler: Scheduler, seed: int):
        self.scheduler, self.random, self.now = scheduler, random.Random(seed), 0.0
        self.running: dict[str, set[int]] = {}  # node -> placements
        self.where: dict[int, str] = {}
        self.starting: list[int] = []
        self.stopping: list[tuple[int, str]] = []
        self.lost: dict[str, set[int]] = {}  # nodes that the scheduler gave up and that still run something
        self.alive: set[int] = set()  # environments, for clients
        self.ready: dict[int, tuple[int, str]] = {}
        self.ended: dict[int, str] = {}
        self.count = Counter()

    def obey(self):
        for decision in self.scheduler.take():
            self.count[type(decision).__name__] += 1
            match decision:
                case Start(placement, env, node, _, parent, parent_node):
                    assert placement not in self.where, "placed twice"
                    assert env not in self.ended
                    assert parent is None or parent in self.running[parent_node]
                    self.where[placement] = node
                    self.running[node].add(placement)
                    self.starting.append(placement)
                case Stop(placement, node):
                    self.stopping.append((placement, node))
                case Ready(env, placement, node):
                    assert env not in self.ready
                    assert self.where[placement] == node
                    assert placement in self.running[node]
                    self.ready[env] = (placement, node)
                case Ended(env, reason):
                    assert env not in self.ended, "ended twice"
                    self.ended[env] = reason
                    self.alive.discard(env)
                    self.ready.pop(env, None)

    def finish(self, placement: int, ok: bool):
        """A start that was asked for ends."""
        node = self.where[placement]
        if placement in self.running.get(node, ()):
            if ok:
                self.scheduler.started(placement, self.now)
            else:
                self.running[node].discard(placement)
                self.scheduler.failed(placement, "broken", self.now)

    def stop(self, placement: int, node: str):
        """A stop that was asked for is done, on a node that is there."""
        if node in self.running:
            self.running[node].discard(placement)
            self.scheduler.stopped(placement, self.now)

    def lose(self, node: str):
        self.lost[node] = self.running.pop(node)
        self.scheduler.lose(node, self.now)

    def join(self, node: str, capacity: Resources):
        alive = self.lost.pop(node, set())
        self.running[node] = alive
        self.scheduler.add_node(node, capacity, self.now, alive=sorted(alive))

    def settle(self):
        """Carries everything out until nothing more comes; then nothing may be left anywhere."""
        for _ in range(1000):
            self.now += 1.0
            starting, self.starting, stopping, self.stopping = self.starting, [], self.stopping, []
            for placement in starting:
                self.finish(placement, True)
            for placement, node in stopping:
                self.stop(placement, node)
            self.scheduler.tick(self.now)
            for node in self.running:
                self.scheduler.report(node, self.now, Resources(), alive=self.running[node])
            self.obey()
            if not (self.starting or self.stopping or len(self.scheduler.table)):
                return
        raise AssertionError(f"not settled: {len(self.scheduler.table)} slots")


CAPACITY = Resources(8000, 16384, 65536, 2048)
FUZZ_SHAPES = [
    Shape(
        f"i{i % 3}", Resources(100 * (1 + i), 128 << i % 4, 500 * (1 + i % 3), 32), Resources(400 * (1 + i), 256 << i % 4, 2200, 48)
    )
    for i in range(6)
]


def fuzz(events: int, seed: int, nodes: int = 12, every: int = 1000, progress=None) -> World:
    """Random requests, answers, failures, losses and returns of nodes, sums checked every `every`; nothing may be left."""
    s = Scheduler(Config(queue_s=30, start_s=20, stop_s=5, silence_s=40, lifetime_s=500, remember=5000))
    world = World(s, seed)
    rnd, envs, keys = world.random, [], 0
    for t in range(4):
        most = Resources(60_000, 10**6, 10**7, 10**6)
        s.set_quota(f"t{t}", Quota(environments=40 + 60 * t, resources=most, creates_per_s=30, burst=20, queue=50))
    for shape, target in ((FUZZ_SHAPES[0], 5), (FUZZ_SHAPES[3], 3)):
        s.set_pool(shape, target)
    for i in range(nodes):
        world.join(f"n{i}", CAPACITY)

    def create():
        nonlocal keys
        keys += 1
        key = keys if rnd.random() < 0.95 else rnd.randint(1, keys)  # some are asked again
        parent = rnd.choice(envs[-50:]) if envs and rnd.random() < 0.2 else None
        try:
            envs.append(s.create(f"t{key % 4}", str(key), rnd.choice(FUZZ_SHAPES), rnd.uniform(1, 60), world.now, parent))
        except Refused as refused:
            world.count[refused.reason] += 1

    def report():
        node = rnd.choice(list(world.running))
        used = [rnd.randrange(most) for most in CAPACITY] if rnd.random() < 0.2 else [0] * 4
        alive = world.running[node] if rnd.random() < 0.5 else None
        if not s.report(node, world.now, Resources(*used), alive):
            world.lost[node] = world.running.pop(node)
            world.join(node, CAPACITY)

    def die():
        node = rnd.choice(list(world.running))
        if world.running[node]:
            placement = rnd.choice(sorted(world.running[node]))
            world.running[node].discard(placement)
            s.stopped(placement, world.now)

    def pop(items):
        return items.pop(rnd.randrange(len(items)))

    acts = {
        create: 22,
        lambda: world.starting and world.finish(pop(world.starting), rnd.random() < 0.93): 23,
        lambda: world.stopping and world.stop(*pop(world.stopping)): 20,
        lambda: envs and s.destroy(rnd.choice(envs[-300:]), world.now): 8,
        lambda: envs and s.renew(rnd.choice(envs[-300:]), rnd.uniform(1, 60), world.now): 8,
        lambda: s.tick(world.now): 10,
        report: 8,
        die: 0.5,
        lambda: len(world.running) > 2 and world.lose(rnd.choice(list(world.running))): 0.2,
        lambda: world.lost and world.join(rnd.choice(list(world.lost)), CAPACITY): 0.5,
        lambda: s.drain(rnd.choice(list(world.running)), world.now, rnd.uniform(0, 20)): 0.1,
    }
    chosen = rnd.choices(list(acts), list(acts.values()), k=events)
    for event, act in enumerate(progress(chosen) if progress else chosen):
        world.now += rnd.expovariate(50)
        act()
        world.obey()
        if event % every == 0:
            check(s)
    s.pools = {shape: 0 for shape in s.pools}
    for env in envs:
        s.destroy(env, world.now)
    for node in list(world.lost):
        world.join(node, CAPACITY)
    world.obey()
    world.settle()
    check(s)
    assert not any(world.running.values()), "a node still runs something"
    assert set(world.ended) == set(envs)
    return world
