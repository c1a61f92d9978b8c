"""A node: one machine's sandboxes, by placement, for the service. In this process, or behind `rpc.Server` with METHODS."""

import asyncio
import os
import re
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rl.environments.anyrun.shapes import MIB
from rl.environments.egress.policy import Policy
from rl.environments.egress.proxy import Resolver, resolve
from rl.environments.egress.way_out import way_out
from rl.environments.sandbox import ImageError, Limits, Sandbox, SandboxBackend, SandboxLost, SandboxSpec

METHODS = ("start", "stop", "exec", "read", "write", "renew", "report", "egress")
CONTROL, COMMANDS = 64, 2048  # threads at most
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
KEEP_S = 3600.0  # a placement that was stopped before its start arrived is not started any more


@dataclass(frozen=True)
class Way:
    """Out of a placement: the policy's name, the variables of its commands, and what closes it."""

    policy: str
    variables: dict[str, str]
    stack: AsyncExitStack


class Agent:
    """Blocking verbs of a backend run in threads. `start` and `stop` may come in any order and any number of times: a start under
    way is joined, and a stop is over when nothing is left. `images`: directory whose entries tenants may name; without one they
    name none but "", unless `any_image`, which is for tests: an image is a directory of the host. `policies`: those that tenants
    may name as a way out; without a name, nothing leaves. `audit`: directory of what went out, a file for each sandbox."""

    def __init__(
        self, backend: SandboxBackend, capacity: list[int] | None = None, images: Path | None = None, any_image: bool = False,
        policies: Mapping[str, Policy] | None = None, audit: Path = Path("anygress"), resolver: Resolver = resolve,
    ):  # fmt: skip
        self.backend, self.capacity, self.image_store, self.any_image = backend, capacity or machine(), images, any_image
        self.policies, self.audit, self.resolver = dict(policies or {}), audit, resolver
        self.sandboxes: dict[int, Sandbox] = {}
        self.ways: dict[int, Way] = {}
        self.openings: dict[int, asyncio.Task] = {}
        self.stopped: dict[int, float] = {}
        self.images: set[str] = set()
        self.starts: dict[int, asyncio.Task] = {}
        self.stops: dict[int, asyncio.Task] = {}
        self.control = ThreadPoolExecutor(CONTROL, thread_name_prefix="control")  # commands, however many, do not delay these
        self.commands = ThreadPoolExecutor(COMMANDS, thread_name_prefix="command")

    async def _run(self, call, *arguments, **options):
        return await asyncio.get_running_loop().run_in_executor(self.control, lambda: call(*arguments, **options))

    async def start(
        self, placement: int, image: str, peak: list[int], lease_s: float, start_s: float, fork: int | None = None
    ) -> None:
        """A sandbox that answers commands; its limits are those of the shape's peak."""
        if placement in self.stopped:
            raise SandboxLost(f"placement {placement} was stopped before it started")
        if placement not in self.sandboxes:
            await joined(self.starts, placement, lambda: self._start(placement, image, peak, lease_s, start_s, fork))

    async def _start(self, placement, image, peak, lease_s, start_s, fork):
        if fork is not None:
            made = await self._run(self._sandbox(fork).fork)
            made.renew(lease_s)
        else:
            cpu, memory, disk, pids = (max(1, amount) for amount in peak)
            limits = Limits(cpus=cpu / 1000, memory_bytes=memory * MIB, disk_bytes=disk * MIB, pids=pids)
            spec = SandboxSpec(image=self._image(image), limits=limits, lease_s=lease_s, start_s=start_s)
            made = await self._run(self.backend.create, spec)
        self.sandboxes[placement] = made
        self.images.add(image)
        if placement in self.stopped:
            raise SandboxLost(f"placement {placement} was stopped while it started")

    def _image(self, name: str) -> str | Path:
        """What a tenant may name: an entry of the store, never a path of this machine."""
        if self.any_image or not name:
            return name
        if self.image_store is None or not IMAGE.fullmatch(name):
            raise ImageError(f"there is no image {name[:100]!r}")
        return self.image_store / name / "rootfs"

    def _sandbox(self, placement: int) -> Sandbox:
        sandbox = self.sandboxes.get(placement)
        if sandbox is None:
            raise SandboxLost(f"placement {placement} is not here")
        return sandbox

    async def stop(self, placement: int) -> None:
        """Nothing of it is left, and nothing will come. Where destroying fails it is still there: stop again."""
        now = time.monotonic()
        if len(self.stopped) > 10_000:
            self.stopped = {key: when for key, when in self.stopped.items() if when > now - KEEP_S}
        self.stopped[placement] = now
        await joined(self.stops, placement, lambda: self._stop(placement))

    async def _stop(self, placement: int):
        if placement in self.starts:
            await asyncio.wait([self.starts[placement]])
        await self._close_way(placement)
        if placement in self.sandboxes:
            await self._run(self.sandboxes[placement].destroy)
            self.sandboxes.pop(placement, None)

    async def egress(self, placement: int, policy: str) -> None:
        """From now on the sandbox reaches what this policy allows, and commands have the variables for it."""
        if policy not in self.policies:
            raise ValueError(f"egress must be one of {', '.join(self.policies) or 'no policies here'}, got {policy[:100]!r}")
        self._sandbox(placement)
        if placement not in self.ways:
            await joined(self.openings, placement, lambda: self._open_way(placement, policy))
        if (way := self.ways.get(placement)) is None:
            raise SandboxLost(f"placement {placement} was stopped when its way out was open")
        if way.policy != policy:
            raise ValueError(f"egress is {way.policy!r} already, got {policy[:100]!r}")

    async def _open_way(self, placement: int, policy: str):
        sandbox, stack = self._sandbox(placement), AsyncExitStack()
        self.audit.mkdir(parents=True, exist_ok=True)
        way = way_out(sandbox, self.policies[policy], log=self.audit / f"{sandbox.id}.jsonl", resolver=self.resolver)
        self.ways[placement] = Way(policy, await stack.enter_async_context(way), stack)
        if placement in self.stopped:
            await self._close_way(placement)
            raise SandboxLost(f"placement {placement} was stopped while its way out was opened")

    async def _close_way(self, placement: int):
        if way := self.ways.pop(placement, None):
            await way.stack.aclose()

    async def _command(self, placement: int, verb: str, *arguments, **options):
        """A verb that may take as long as it likes."""
        call = getattr(self._sandbox(placement), verb)
        return await asyncio.get_running_loop().run_in_executor(self.commands, lambda: call(*arguments, **options))

    async def exec(self, placement: int, command, **options) -> dict:
        if way := self.ways.get(placement):
            options["env"] = way.variables | (options.get("env") or {})
        return vars(await self._command(placement, "exec", command, **options))

    async def read(self, placement: int, path: str, **options) -> bytes:
        return await self._command(placement, "read", path, **options)

    async def write(self, placement: int, path: str, data: bytes, **options) -> None:
        await self._command(placement, "write", path, data, **options)

    async def renew(self, placement: int, lease_s: float) -> None:
        await self._run(self._sandbox(placement).renew, lease_s)

    async def report(self) -> dict:
        """Capacity, live use, placements that are alive, images. A sandbox that ended by itself is taken off."""

        def alive() -> list[int]:
            for placement, sandbox in list(self.sandboxes.items()):
                try:
                    sandbox.check()
                except SandboxLost:
                    if placement not in self.stops:
                        self.sandboxes.pop(placement, None)
            return list(self.sandboxes)

        placements = await self._run(alive)
        for placement in self.ways.keys() - self.sandboxes.keys():
            await self._close_way(placement)
        return {"capacity": self.capacity, "live": live(), "alive": placements, "images": sorted(self.images)}

    async def close_ways(self):
        """Before `close`, where ways out were opened: nothing leaves any more."""
        for placement in list(self.ways):
            await self._close_way(placement)

    def close(self):
        self.backend.close()
        for pool in (self.control, self.commands):
            pool.shutdown(wait=False, cancel_futures=True)


async def joined(under_way: dict[int, asyncio.Task], key: int, work) -> None:
    """Waits for the one task of this key, begun if there is none; whoever stops waiting does not stop it."""
    if key not in under_way:
        task = under_way[key] = asyncio.create_task(work())

        def over(_):
            del under_way[key]
            task.cancelled() or task.exception()  # it has been looked at, even if nobody waits any more

        task.add_done_callback(over)
    await asyncio.shield(under_way[key])


def machine() -> list[int]:
    """What this machine has, as a vector of Resources."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
    disk = shutil.disk_usage("/tmp").total // MIB
    return [1000 * len(os.sched_getaffinity(0)), memory, disk, int(Path("/proc/sys/kernel/pid_max").read_text())]


def live() -> list[int]:
    """What is in use now, by anybody. The load counts running processes: it notices CPU pressure, not shares."""
    load, _, _, counts, _ = Path("/proc/loadavg").read_text().split()
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name: int(facts[name].split()[0]) for name in ("MemTotal", "MemAvailable")}
    disk = shutil.disk_usage("/tmp").used // MIB
    return [int(1000 * float(load)), (kib["MemTotal"] - kib["MemAvailable"]) // 1024, disk, int(counts.split("/")[1])]
