"""The scheduler: events in, decisions out. No clock, no I/O, no randomness: the same events give the same decisions.

    create -> QUEUED -> STARTING -> RUNNING -> STOPPING -> gone
                 ^---------' a failed start or a lost node: at most `attempts` times

Callers say what happened (`create`, `started`, `report`, ..., each with the time) and carry out what `take()` returns: `Start` and
`Stop` for nodes, `Ready` and `Ended` for whoever asked. A *placement* is one attempt of an environment on one node. An environment
has at most one, its resources are held until the node confirms the `Stop` (repeated until then) or is lost, and a node that comes
back is told to stop whatever it still runs; so no environment is ever placed twice and nothing leaks. Every wait has a deadline:
in the queue, for the start, the lease (renewed by the client, never past `lifetime_s`).
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rl.environments.anyrun.nodes import DRAINING, GONE, Nodes, grown
from rl.environments.anyrun.shapes import Quota, Resources, Shape
from rl.environments.anyrun.table import FREE, NEVER, QUEUED, RUNNING, STARTING, STATES, STOPPING, Table
from rl.environments.anyrun.tenants import POOL, Tenant

LATE = {QUEUED: "queue timeout", STARTING: "start timeout", RUNNING: "lease expired"}
SHAPES = 16  # numbers of shapes at first


@dataclass(frozen=True)
class Config:
    overcommit: tuple[float, ...] = (4.0, 1.0, 1.0, 1.0)  # promised / capacity, per resource: CPU is shared, memory is not
    pressure: tuple[float, ...] = (0.95, 0.92, 0.92, 0.90)  # live use / capacity above which nothing more is placed
    creates_per_s: float = 100.0  # starts per node
    burst: int = 50  # starts at once per node
    image_cost: float = 0.05  # of a node without the image, in units of a whole node's room
    attempts: int = 3  # starts per request
    queue_s: float = 600.0
    start_s: float = 120.0  # until a node must have answered
    stop_s: float = 10.0  # until a Stop is repeated
    lifetime_s: float = 86_400.0  # no lease goes past it
    silence_s: float = 30.0  # a node that does not report for so long is lost
    gap_s: float = 10.0  # time without a tick that counts as a pause of the scheduler: deadlines move with it
    remember: int = 200_000  # ended environments whose keys and reasons are kept
    fork_away: bool = True  # whether a fork may start on another node where its parent's has no room
    pump: int = 2_000  # placements from queues per tick


class Start(NamedTuple):
    """Begin on this node; `parent`, if any, is the placement to fork, on `parent_node`."""

    placement: int
    env: int
    node: str
    shape: Shape
    parent: int | None
    parent_node: str | None


class Stop(NamedTuple):
    placement: int
    node: str


class Ready(NamedTuple):
    env: int
    placement: int
    node: str


class Ended(NamedTuple):
    env: int
    reason: str


class Refused(ValueError):
    """A request that cannot be served, now or ever; `reason` is one word for metrics."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class Scheduler:
    def __init__(self, config: Config | None = None):
        self.config = c = config or Config()
        self.nodes = Nodes(
            overcommit=c.overcommit, pressure=c.pressure, creates_per_s=c.creates_per_s, burst=c.burst, image_cost=c.image_cost
        )
        self.table = Table()
        self.tenants = [Tenant("", Quota(creates_per_s=1e9))]
        self.tenant_number = {"": POOL}
        self.shapes: list[Shape | None] = [None] * SHAPES
        self.shape_number: dict[Shape, int] = {}
        self.spare_shapes = list(range(SHAPES - 1, -1, -1))  # numbers that no shape has
        self.steady_SR, self.peak_SR = np.zeros((2, SHAPES, 4), np.int64)
        self.slot_of: dict[int, int] = {}  # placement -> slot
        self.keys: dict[str, int] = {}  # "tenant/key" -> id, also of remembered environments
        self.ended: OrderedDict[int, tuple[str, str | None]] = OrderedDict()  # id -> reason, "tenant/key"
        self.warm: dict[int, list[int]] = {}  # shape -> slots of ready environments that nobody owns
        self.pools: dict[int, int] = {}  # shape -> how many of them are wanted
        self.stocked: dict[int, int] = {}  # shape -> how many of them are ready or on their way
        self.draining: dict[int, float] = {}  # node -> when what is left there ends
        self.decisions: list = []
        self.placements = self.turn = 0
        self.now = self.ticked = float("-inf")

    def take(self) -> list:
        """Decisions since the last call."""
        decisions, self.decisions = self.decisions, []
        return decisions

    # Requests

    def create(self, tenant: str, key: str, shape: Shape, lease_s: float, now: float, parent: int | None = None) -> int:
        """The id of the environment that this key asks for: the same one however often it is asked. Raises Refused."""
        known = self.keys.get(f"{tenant}/{key}")
        if known is not None:
            return known
        self._advance(now)
        number, kind = self._tenant(tenant), self._shape(shape)
        who = self.tenants[number]
        if parent is not None and self.state(parent) != "running":
            raise Refused("no-parent", f"environment {parent} to fork is not running")
        if who.waiting >= who.quota.queue:
            raise Refused("queue-full", f"{tenant} has {who.waiting} requests waiting")
        if self.nodes.number and not self.nodes.ever_fits(self.peak_SR[kind]):
            raise Refused("too-large", f"no node could ever hold {shape}")
        slot = self._new(number, kind, lease_s, f"{tenant}/{key}", parent)
        if self._head(who, kind) is not None or self._try(slot) is not None:
            who.queues.setdefault(kind, deque()).append(self._id(slot))
        return self.keys[f"{tenant}/{key}"]

    def renew(self, env: int, lease_s: float, now: float) -> bool:
        """The lease runs for `lease_s` from now; False where there is nothing left to renew."""
        self._advance(now)
        slot, table = self.table.slot(env), self.table
        if slot is None or table.state[slot] == STOPPING:
            return False
        table.lease[slot] = lease_s
        if table.state[slot] == RUNNING:
            table.deadline[slot] = min(self.now + lease_s, table.last[slot])
        return True

    def destroy(self, env: int, now: float, reason: str = "destroyed"):
        """Ends an environment; of one that has ended, or never was, nothing happens."""
        self._advance(now)
        slot = self.table.slot(env)
        if slot is not None:
            self._end(slot, reason)

    def state(self, env: int) -> str | None:
        """ "queued", "starting", "running", "ended: REASON"; None of an id that was never given or is forgotten."""
        slot = self.table.slot(env)
        if slot is not None and self.table.state[slot] != STOPPING:
            return STATES[self.table.state[slot]]
        return f"ended: {self.ended[env][0]}" if env in self.ended else None

    def owner(self, env: int) -> str | None:
        """The tenant that asked for it, also of one that has ended and is remembered."""
        slot = self.table.slot(env)
        if slot is not None:
            return self.tenants[self.table.tenant[slot]].name
        return self.ended[env][1].split("/", 1)[0] if env in self.ended else None

    def set_quota(self, tenant: str, quota: Quota):
        self.tenants[self._tenant(tenant)].quota = quota

    def set_pool(self, shape: Shape, target: int):
        """Keeps `target` started environments of this shape that the next requests for it get at once."""
        self.pools[self._shape(shape)] = target

    # What nodes say

    def add_node(self, name: str, capacity: Resources, now: float, images=(), alive=()):
        """A node joins, or joins again after a restart: what it still runs is stopped, what it ran before is lost."""
        self._advance(now)
        if name in self.nodes.number:
            self._lose(self.nodes.number[name])
        self.nodes.add(name, capacity, self.now, images)
        self.decisions += [Stop(placement, name) for placement in alive]

    def report(self, name: str, now: float, live: Resources, alive=None, asked: float | None = None, images=()) -> bool:
        """What the node uses; `alive`: all placements it runs, at a time not before `asked`. False: it must join again."""
        self._advance(now)
        node = self.nodes.number.get(name)
        if node is None:
            self.decisions += [Stop(placement, name) for placement in alive or ()]
            return False
        self.nodes.report(node, self.now, [*live])
        self.nodes.has(node, images)
        if alive is not None:
            alive, table, asked = set(alive), self.table, now if asked is None else asked
            mine = {int(table.placement[slot]): slot for slot in table.on(node)}
            self.decisions += [Stop(placement, name) for placement in sorted(alive - mine.keys())]
            for placement, slot in mine.items():
                if placement not in alive and table.state[slot] == RUNNING and table.since[slot] < asked:
                    self._unplace(slot)
                    self._end(slot, "died")
        return True

    def started(self, placement: int, now: float):
        """The environment answers."""
        self._advance(now)
        slot, table = self.slot_of.get(placement), self.table
        if slot is None or table.state[slot] != STARTING:
            return
        node = int(table.node[slot])
        self._settle(slot)
        self.nodes.failures_N[node] = 0
        self.nodes.has(node, [self.shapes[table.shape[slot]].image])
        if table.tenant[slot] == POOL:
            self.warm.setdefault(int(table.shape[slot]), []).append(slot)
            table.state[slot], table.since[slot], table.deadline[slot] = RUNNING, self.now, NEVER
        else:
            self._run(slot)

    def failed(self, placement: int, reason: str, now: float, final: bool = False):
        """A start failed and has left nothing behind on the node. `final`: it would anywhere, and the node is not to blame."""
        self._advance(now)
        slot, table = self.slot_of.get(placement), self.table
        if slot is None:
            return
        if table.state[slot] == STARTING and final:
            self._unplace(slot)
            self._end(slot, f"start failed: {reason}")
        elif table.state[slot] == STARTING:
            self.nodes.failed(int(table.node[slot]), self.now)
            self._again(slot, f"start failed: {reason}")
        else:
            self.stopped(placement, now)

    def stopped(self, placement: int, now: float):
        """The placement is gone, asked for or not."""
        self._advance(now)
        slot = self.slot_of.get(placement)
        if slot is not None:
            self._unplace(slot)
            self._end(slot, "died")

    def drain(self, name: str, now: float, grace_s: float = 0.0):
        """No more placements there; what still runs after `grace_s` ends. The node is gone when nothing is left."""
        self._advance(now)
        node = self.nodes.number.get(name)
        if node is not None and node not in self.draining:
            self.nodes.close(node, DRAINING)
            self.draining[node] = self.now + grace_s
            for slot in self.table.on(node):
                if self.table.tenant[slot] == POOL:
                    self._end(slot, "drained")

    def lose(self, name: str, now: float):
        self._advance(now)
        if name in self.nodes.number:
            self._lose(self.nodes.number[name])

    # Time

    def tick(self, now: float):
        """Ends what is due, notices silent nodes, serves the queues, fills the pools. To be called often (every 20 ms or so)."""
        self._advance(now)
        table, nodes, config = self.table, self.nodes, self.config
        if self.now - self.ticked > config.gap_s and self.ticked != float("-inf"):  # we slept: nobody else is to blame
            gap = self.now - self.ticked
            table.deadline += gap
            nodes.seen_N += gap
            self.draining = {node: end + gap for node, end in self.draining.items()}
        self.ticked = self.now
        silent = (nodes.state_N[: len(nodes)] != GONE) & (nodes.seen_N[: len(nodes)] < self.now - config.silence_s)
        for node in np.flatnonzero(silent).tolist():
            self._lose(node)
        for slot in table.due(self.now):
            if table.state[slot] == STOPPING:
                self._stop(slot)
            else:
                self._end(slot, LATE[int(table.state[slot])])
        for node, end in list(self.draining.items()):
            left = self.table.on(node)
            if not left:
                self._lose(node)
            elif self.now >= end:
                for slot in left:
                    self._end(slot, "drained")
        self._pump()
        self._restock()

    def _advance(self, now: float):
        self.now = max(self.now, now)  # a clock that jumps back stands still

    # Inside

    def _id(self, slot: int) -> int:
        return int(self.table.id[slot])

    def _tenant(self, name: str) -> int:
        if name not in self.tenant_number:
            if "/" in name:  # it separates the tenant from the key
                raise ValueError(f"a tenant's name has no / in it, got {name!r}")
            self.tenant_number[name] = len(self.tenants)
            self.tenants.append(Tenant(name, Quota()))
        return self.tenant_number[name]

    def _shape(self, shape: Shape) -> int:
        if shape not in self.shape_number:
            if not self.spare_shapes:
                self._forget_shapes()
            number = self.shape_number[shape] = self.spare_shapes.pop()
            self.shapes[number] = shape
            self.steady_SR[number], self.peak_SR[number] = [*shape.steady], [*shape.peak]
        return self.shape_number[shape]

    def _forget_shapes(self):
        """Frees the numbers of shapes that no environment and no pool has: clients may ask for ever new ones."""
        table, room = self.table, len(self.shapes)
        used = set(np.unique(table.shape[table.state != FREE]).tolist()) | self.pools.keys()
        self.shape_number = {shape: number for shape, number in self.shape_number.items() if number in used}
        self.spare_shapes = [number for number in range(room) if number not in used]
        if len(self.spare_shapes) < room // 2:
            self.spare_shapes += range(room, 2 * room)
            self.shapes += [None] * room
            self.steady_SR, self.peak_SR = (grown(needs_SR, 2 * room, 0) for needs_SR in (self.steady_SR, self.peak_SR))

    def _new(self, tenant: int, shape: int, lease_s: float, key: str | None, parent: int | None) -> int:
        table = self.table
        slot = table.new(key)
        table.tenant[slot], table.shape[slot], table.lease[slot] = tenant, shape, lease_s
        table.parent[slot] = -1 if parent is None else parent
        table.deadline[slot] = self.now + self.config.queue_s
        self.tenants[tenant].waiting += 1
        if key is not None:
            self.keys[key] = self._id(slot)
        return slot

    def _try(self, slot: int) -> str | None:
        """Places a queued environment, or says what it waits for: "quota", "room", or "parent" (room on its node)."""
        table, nodes = self.table, self.nodes
        shape, who = int(table.shape[slot]), self.tenants[table.tenant[slot]]
        steady_R, peak_R = self.steady_SR[shape], self.peak_SR[shape]
        if not who.may(self.shapes[shape].steady, self.now):
            return "quota"
        parent = None
        if table.parent[slot] >= 0:
            parent = table.slot(int(table.parent[slot]))
            if parent is None or table.state[parent] != RUNNING:
                self._end(slot, "parent gone")
                return None
        elif self.warm.get(shape) and table.tenant[slot] != POOL:
            self._adopt(slot, self.warm[shape].pop())
            return None
        if parent is not None and nodes.can_take(int(table.node[parent]), peak_R, self.now):
            node = int(table.node[parent])
        elif parent is not None and not self.config.fork_away:
            return "parent"
        else:
            node = nodes.pick(peak_R, self.shapes[shape].image, self.now)
        if node is None:
            return "room"
        who.take(self.shapes[shape].steady, self.now)
        who.waiting -= 1
        nodes.reserve(node, steady_R, peak_R, self.now)
        self.placements += 1
        table.placement[slot], table.node[slot], table.peak[slot] = self.placements, node, True
        table.attempts[slot] += 1
        table.reports[slot] = nodes.reports_N[node]
        table.state[slot], table.deadline[slot] = STARTING, self.now + self.config.start_s
        self.slot_of[self.placements] = slot
        origin = (None, None) if parent is None else (int(table.placement[parent]), nodes.names[table.node[parent]])
        self.decisions.append(Start(self.placements, self._id(slot), nodes.names[node], self.shapes[shape], *origin))
        return None

    def _adopt(self, slot: int, warm: int):
        """`slot` gets the placement of `warm`, which ends."""
        table = self.table
        table.placement[slot], table.node[slot], table.reports[slot] = table.placement[warm], table.node[warm], table.reports[warm]
        self.slot_of[int(table.placement[slot])] = slot
        shape = int(table.shape[warm])
        who = self.tenants[table.tenant[slot]]
        who.take(self.shapes[shape].steady, self.now)
        who.waiting -= 1
        self.tenants[POOL].give(self.shapes[shape].steady)
        self.stocked[shape] -= 1
        table.drop(warm)
        self._run(slot)

    def _run(self, slot: int):
        table = self.table
        table.state[slot], table.since[slot], table.last[slot] = RUNNING, self.now, self.now + self.config.lifetime_s
        table.deadline[slot] = min(self.now + table.lease[slot], table.last[slot])
        self.decisions.append(Ready(self._id(slot), int(table.placement[slot]), self.nodes.names[table.node[slot]]))

    def _settle(self, slot: int):
        """The start's peak is over."""
        table, shape = self.table, self.table.shape[slot]
        if table.peak[slot]:
            self.nodes.settle(int(table.node[slot]), self.steady_SR[shape], self.peak_SR[shape])
            table.peak[slot] = False

    def _unplace(self, slot: int):
        """The placement no longer exists; its resources are free."""
        table, shape = self.table, int(self.table.shape[slot])
        self._settle(slot)
        node = int(table.node[slot])
        self.nodes.release(node, self.steady_SR[shape], seen=bool(table.reports[slot] < self.nodes.reports_N[node]))
        self.tenants[table.tenant[slot]].give(self.shapes[shape].steady)
        del self.slot_of[int(table.placement[slot])]
        table.placement[slot] = table.node[slot] = -1

    def _again(self, slot: int, reason: str):
        """A start came to nothing: once more, first in its queue, or the end."""
        table = self.table
        self._unplace(slot)
        if table.attempts[slot] >= self.config.attempts or table.tenant[slot] == POOL:
            self._end(slot, reason)
            return
        who = self.tenants[table.tenant[slot]]
        who.waiting += 1
        who.queues.setdefault(int(table.shape[slot]), deque()).appendleft(self._id(slot))
        table.state[slot], table.deadline[slot] = QUEUED, self.now + self.config.queue_s

    def _end(self, slot: int, reason: str):
        """The environment ends, for its owner at once; its slot when nothing is left on a node."""
        table = self.table
        placed = table.placement[slot] >= 0
        if table.state[slot] != STOPPING:
            self._forget(slot, reason)
            if placed:
                table.state[slot] = STOPPING
                self._stop(slot)
        if not placed:
            table.drop(slot)

    def _forget(self, slot: int, reason: str):
        """Tells the owner, and keeps the key so that a late repetition of the request makes nothing new."""
        table, env = self.table, self._id(slot)
        if table.state[slot] == QUEUED:
            self.tenants[table.tenant[slot]].waiting -= 1
        if table.tenant[slot] == POOL:
            shape = int(table.shape[slot])
            self.stocked[shape] -= 1
            if slot in self.warm.get(shape, ()):
                self.warm[shape].remove(slot)
            return
        self.decisions.append(Ended(env, reason))
        self.ended[env] = (reason, table.key[slot])
        if len(self.ended) > self.config.remember:
            _, (_, key) = self.ended.popitem(last=False)
            self.keys.pop(key, None)

    def _stop(self, slot: int):
        self.table.deadline[slot] = self.now + self.config.stop_s
        self.decisions.append(Stop(int(self.table.placement[slot]), self.nodes.names[self.table.node[slot]]))

    def _lose(self, node: int):
        """Everything on the node is gone: running environments end, starting ones are placed again."""
        self.nodes.close(node, GONE)
        self.draining.pop(node, None)
        for slot in reversed(self.table.on(node)):  # the oldest is put first in its queue last
            if self.table.state[slot] == STARTING:
                self._again(slot, "node lost")
            else:
                self._unplace(slot)
                self._end(slot, "node lost")

    def _pump(self):
        """Serves the queues, one placement per tenant in turn. A shape that finds no room is tried again at the next tick only."""
        full: set[int] = set()
        turns = deque(who for who in self.tenants if who.queues)
        turns.rotate(-self.turn)
        self.turn += 1
        budget = self.config.pump
        while turns and budget:
            who = turns.popleft()
            if self._serve(who, full):
                turns.append(who)
                budget -= 1

    def _serve(self, who: Tenant, full: set[int]) -> bool:
        """Places the first of this tenant's requests that can be; the queue it came from goes behind the tenant's others."""
        for shape in list(who.queues):
            env = self._head(who, shape)
            if env is not None and shape not in full:
                waits = self._try(self.table.slot(env))
                if waits is None:
                    who.queues[shape].popleft()
                    who.queues.move_to_end(shape)
                    return True
                if waits == "room":
                    full.add(shape)
        return False

    def _head(self, who: Tenant, shape: int) -> int | None:
        """The request of this shape that has waited longest; those that ended meanwhile leave the queue."""
        queue = who.queues.get(shape, ())
        while queue:
            if self.state(queue[0]) == "queued":
                return queue[0]
            queue.popleft()
        who.queues.pop(shape, None)
        return None

    def _restock(self):
        for shape, target in self.pools.items():
            while (stocked := self.stocked.get(shape, 0)) < target:
                self.stocked[shape] = stocked + 1
                slot = self._new(POOL, shape, NEVER, None, None)
                if self._try(slot) is not None:
                    self._end(slot, "no room")
                    break
            for _ in range(self.stocked.get(shape, 0) - target):
                if not self.warm.get(shape):
                    break
                self._end(self.warm[shape][-1], "surplus")
