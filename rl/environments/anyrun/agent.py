"""A node: one machine's sandboxes, by placement, for the service. In this process, or behind `rpc.Server` with METHODS."""

import asyncio
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rl.environments.anyrun.shapes import MIB
from rl.environments.sandbox import ImageError, Limits, Sandbox, SandboxBackend, SandboxLost, SandboxSpec

METHODS = ("start", "stop", "exec", "read", "write", "renew", "report")
CONTROL, COMMANDS = 64, 2048  # threads at most
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
KEEP_S = 3600.0  # a placement that was stopped before its start arrived is not started any more


class Agent:
    """Blocking verbs of a backend run in threads. `start` and `stop` may come in any order and any number of times: a start under
    way is joined, and a stop is over when nothing is left. `images`: directory whose entries tenants may name; without one they
    name none but "", unless `any_image`, which is for tests: an image is a directory of the host."""

    def __init__(
        self, backend: SandboxBackend, capacity: list[int] | None = None, images: Path | None = None, any_image: bool = False
    ):
        self.backend, self.capacity, self.image_store, self.any_image = backend, capacity or machine(), images, any_image
        self.sandboxes: dict[int, Sandbox] = {}
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
        if placement in self.sandboxes:
            await self._run(self.sandboxes[placement].destroy)
            self.sandboxes.pop(placement, None)

    async def _command(self, placement: int, verb: str, *arguments, **options):
        """A verb that may take as long as it likes."""
        call = getattr(self._sandbox(placement), verb)
        return await asyncio.get_running_loop().run_in_executor(self.commands, lambda: call(*arguments, **options))

    async def exec(self, placement: int, command, **options) -> dict:
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
        return {"capacity": self.capacity, "live": live(), "alive": placements, "images": sorted(self.images)}

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
