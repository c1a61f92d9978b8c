"""The service: a scheduler, its nodes, and a loop that carries decisions out.

    service = Anyrun(); await service.start()
    await service.add_node("n0", Agent(open_backend()))                    # or an rpc.Client of one elsewhere
    env = await service.create("tenant", "request-1", image, [250, 256, 512, 32])
    await service.exec("tenant", env["id"], "make test")

Whoever calls may vanish: what it made ends with its lease. A call of an environment that has ended raises SandboxLost with the
reason; what goes wrong with one environment or node is the business of no other.
"""

import asyncio
import contextlib
import time

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rl.environments.anyrun.rpc import Unreachable
from rl.environments.anyrun.scheduler import Config, Ended, Ready, Scheduler, Start, Stop
from rl.environments.anyrun.shapes import RESOURCES, Quota, Shape, vector
from rl.environments.sandbox import ImageError, LeaseExpired, SandboxError, SandboxLost, StartTimeout

METHODS = ("create", "exec", "read", "write", "renew", "destroy", "state", "status", "drain", "pool", "quota")
LONGEST = 500  # characters of a key or an image's name
ADMIN = "admin"  # the tenant that may see all and change nodes
WAYS_TO_END = {"lease expired": LeaseExpired, "start timeout": StartTimeout, "queue timeout": StartTimeout}


class Anyrun:
    def __init__(self, config: Config | None = None, *, tick_s: float = 0.02, report_s: float = 1.0, call_s: float = 10.0):
        self.scheduler = Scheduler(config or Config(fork_away=False))
        self.tick_s, self.report_s, self.call_s = tick_s, report_s, call_s
        self.nodes: dict[str, object] = {}
        self.ready: dict[int, asyncio.Future] = {}  # environments somebody waits for
        self.where: dict[int, tuple[int, str]] = {}  # running: placement and node
        self.asked: dict[int, float] = {}
        self.tasks: set[asyncio.Task] = set()
        self.registry = CollectorRegistry()
        self.ended = Counter("anyrun_ended", "Environments that ended", ["reason"], registry=self.registry)
        self.started = Counter("anyrun_started", "Environments that became ready", registry=self.registry)
        self.failures = Counter("anyrun_start_failures", "Starts that failed", ["node"], registry=self.registry)
        self.wait = Histogram("anyrun_ready_seconds", "From request to ready", registry=self.registry)
        self.gauge = Gauge("anyrun_environments", "Environments by state", ["state"], registry=self.registry)
        self.free = Gauge("anyrun_node_free", "Room left for promises", ["node", "resource"], registry=self.registry)

    # Its life

    async def start(self):
        self.loop = asyncio.create_task(self._loop())

    async def close(self):
        for task in [self.loop, *self.tasks]:
            task.cancel()
        await asyncio.gather(self.loop, *self.tasks, return_exceptions=True)

    async def add_node(self, name: str, node) -> None:
        """Joins with what it still runs; that is stopped."""
        report = await node.report()
        self.nodes[name] = node
        capacity = vector(report["capacity"])
        self.scheduler.add_node(name, capacity, time.monotonic(), report["images"], report["alive"])
        self._spawn(self._watch(name, node))

    async def _loop(self):
        while True:
            self.scheduler.tick(time.monotonic())
            self._obey()
            await asyncio.sleep(self.tick_s)

    async def _watch(self, name: str, node):
        """Asks the node how it is. Its silence is the scheduler's to judge."""
        while self.nodes.get(name) is node:
            await asyncio.sleep(self.report_s)
            asked = time.monotonic()
            with contextlib.suppress(SandboxError, OSError, TimeoutError, ValueError, TypeError, KeyError):  # nonsense is silence
                async with asyncio.timeout(self.call_s):
                    report = await node.report()
                now, live = time.monotonic(), vector(report["live"])
                if not self.scheduler.report(name, now, live, report["alive"], asked, report["images"]):
                    self.scheduler.add_node(name, vector(report["capacity"]), now, report["images"], report["alive"])
                self._obey()

    def _spawn(self, work):
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _obey(self):
        for decision in self.scheduler.take():
            match decision:
                case Start():
                    self._spawn(self._start(decision))
                case Stop(placement, node):
                    self._spawn(self._stop(placement, node))
                case Ready(env, placement, node):
                    self.where[env] = placement, node
                    self.started.inc()
                    self.wait.observe(time.monotonic() - self.asked.pop(env, time.monotonic()))
                    if env in self.ready:
                        self.ready.pop(env).set_result(None)
                case Ended(env, reason):
                    self.where.pop(env, None)
                    self.asked.pop(env, None)
                    self.ended.labels(reason.split(":")[0]).inc()
                    if env in self.ready:
                        self.ready.pop(env).set_exception(gone(env, reason))

    async def _start(self, start: Start):
        config, shape = self.scheduler.config, start.shape
        try:
            async with asyncio.timeout(config.start_s):
                limits = dict(peak=[*shape.peak], lease_s=config.lifetime_s, start_s=config.start_s)
                await self.nodes[start.node].start(placement=start.placement, image=shape.image, fork=start.parent, **limits)
        except TimeoutError:
            return  # the scheduler's own deadline stops it
        except Unreachable:
            return  # nobody knows whether it runs: stopped when late, or lost with its node
        except (SandboxError, OSError, ValueError) as error:
            self.failures.labels(start.node).inc()
            final = isinstance(error, (ImageError, ValueError))
            self.scheduler.failed(start.placement, f"{type(error).__name__}: {error}"[:300], time.monotonic(), final)
        else:
            self.scheduler.started(start.placement, time.monotonic())
        self._obey()

    async def _stop(self, placement: int, name: str):
        with contextlib.suppress(SandboxError, OSError, TimeoutError):  # the scheduler repeats it
            async with asyncio.timeout(self.call_s):
                await self.nodes[name].stop(placement=placement)
            self.scheduler.stopped(placement, time.monotonic())
            self._obey()

    # What tenants call

    async def create(
        self, tenant: str, key: str, image: str, steady: list[int], peak: list[int] | None = None, lease_s: float = 600.0,
        parent: int | None = None, wait_s: float = 60.0, egress: str = "",
    ) -> dict:  # fmt: skip
        """An environment that answers, or its state after `wait_s`: the same one for the same key. `parent`: a fork of that one.

        egress: name of the policy of its way out, one of its node's; without it nothing leaves. It is open when the environment is
        said to be running; where it cannot be opened, the environment ends, unless it ran before this call.
        """
        if parent is not None:
            self._own(tenant, parent)
        if len(key) > LONGEST or len(image) > LONGEST:
            raise ValueError(f"key and image have at most {LONGEST} characters")
        shape = Shape(image, vector(steady), vector(peak) if peak else None)
        env = self.scheduler.create(tenant, key, shape, positive(lease_s), time.monotonic(), parent)
        ran = env in self.where  # before this call: it is a repetition
        state = self.scheduler.state(env)
        if state in ("queued", "starting"):
            self.asked.setdefault(env, time.monotonic())
            future = self.ready.setdefault(env, asyncio.get_running_loop().create_future())
            self._obey()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await asyncio.shield(future)
        else:
            self._obey()
        state = self.scheduler.state(env)
        if state is None or state.startswith("ended"):
            raise gone(env, (state or "ended: forgotten").removeprefix("ended: "))
        if egress and env in self.where:
            try:
                await self._call(tenant, env, "egress", self.call_s, policy=egress)
            except Exception:
                if not ran:
                    await self.destroy(tenant, env)
                raise
        return {"id": env, "state": state, "node": self.where.get(env, (0, None))[1]}

    async def exec(self, tenant: str, env: int, command, **options) -> dict:
        return await self._call(tenant, env, "exec", options.get("timeout_s") or 120.0, command=command, **options)

    async def read(self, tenant: str, env: int, path: str, **options) -> bytes:
        return await self._call(tenant, env, "read", 60.0, path=path, **options)

    async def write(self, tenant: str, env: int, path: str, data: bytes, **options) -> None:
        await self._call(tenant, env, "write", 60.0, path=path, data=data, **options)

    async def _call(self, tenant: str, env: int, verb: str, least_s: float, **arguments):
        """A verb where the environment runs. A node that does not answer loses the call, and the rest goes on."""
        placement, name = self._own(tenant, env)
        try:
            async with asyncio.timeout(least_s + self.call_s):
                return await getattr(self.nodes[name], verb)(placement=placement, **arguments)
        except TimeoutError:
            raise SandboxLost(f"node {name} did not answer {verb} in time") from None

    async def renew(self, tenant: str, env: int, lease_s: float) -> None:
        self._own(tenant, env)
        self.scheduler.renew(env, positive(lease_s), time.monotonic())

    async def destroy(self, tenant: str, env: int) -> None:
        """Idempotent."""
        if tenant in (self.scheduler.owner(env), ADMIN):
            self.scheduler.destroy(env, time.monotonic())
            self._obey()

    async def state(self, tenant: str, env: int) -> str | None:
        return self.scheduler.state(env) if self.scheduler.owner(env) == tenant else None

    def _own(self, tenant: str, env: int) -> tuple[int, str]:
        """Where the environment runs, for its owner."""
        mine = self.scheduler.owner(env) == tenant
        if env not in self.where or not mine:
            state = self.scheduler.state(env) if mine else None
            raise gone(env, (state or "unknown").removeprefix("ended: "))
        return self.where[env]

    # What administrators call

    async def drain(self, tenant: str, node: str, grace_s: float = 0.0) -> None:
        only_admin(tenant)
        self.scheduler.drain(node, time.monotonic(), grace_s)
        self._obey()

    async def pool(self, tenant: str, image: str, steady: list[int], target: int, peak: list[int] | None = None) -> None:
        """Keeps so many started environments of this shape; the next requests for it get them at once."""
        only_admin(tenant)
        self.scheduler.set_pool(Shape(image, vector(steady), vector(peak) if peak else None), target)

    async def quota(self, tenant: str, name: str, resources: list[int] | None = None, **limits) -> None:
        """What the tenant `name` may have from now on: fields of `Quota`."""
        only_admin(tenant)
        self.set_quota(name, Quota(resources=vector(resources) if resources else None, **limits))

    async def status(self, tenant: str) -> dict:
        only_admin(tenant)
        scheduler, nodes = self.scheduler, self.scheduler.nodes
        columns = np.stack([nodes.reserved_RN, nodes.live_RN, nodes.capacity_RN])
        return {
            "environments": {"running": len(self.where), "all": len(scheduler.table)},
            "placements": scheduler.placements,
            "tenants": [{"name": who.name or "(warm)", "count": who.count, "waiting": who.waiting} for who in scheduler.tenants],
            "nodes": [
                {
                    "name": name,
                    "environments": int(nodes.count_N[i]),
                    "state": ("open", "draining", "gone")[nodes.state_N[i]],
                    "silent_s": time.monotonic() - float(nodes.seen_N[i]),
                    **dict(zip(RESOURCES, columns[:, :, i].T.tolist(), strict=True)),  # reserved, live, capacity
                }
                for name, i in nodes.number.items()
            ],
        }

    def metrics(self) -> bytes:
        """Prometheus text."""
        self.gauge.labels("running").set(len(self.where))
        self.gauge.labels("waiting").set(sum(who.waiting for who in self.scheduler.tenants))
        self.gauge.labels("held").set(len(self.scheduler.slot_of))
        nodes = self.scheduler.nodes
        for name, i in nodes.number.items():
            for k, resource in enumerate(RESOURCES):
                self.free.labels(name, resource).set(int(nodes.free_RN[k, i]))
        return generate_latest(self.registry)

    def set_quota(self, tenant: str, quota: Quota):
        self.scheduler.set_quota(tenant, quota)


def only_admin(tenant: str):
    if tenant != ADMIN:
        raise ValueError("only the administrator's token may do this")


def positive(seconds: float) -> float:
    if not 0 < seconds < float("inf"):  # NaN, too
        raise ValueError(f"lease_s must be positive, got {seconds}")
    return seconds


def gone(env: int, reason: str) -> SandboxError:
    """The typed error of an environment that ended for this reason."""
    return WAYS_TO_END.get(reason, SandboxLost)(f"environment {env}: {reason}")
