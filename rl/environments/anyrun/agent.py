"""A node: one machine's sandboxes, by placement, for the service. In this process, or behind `rpc.Server` with METHODS."""

import asyncio
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rl.environments.anyrun.shapes import MIB
from rl.environments.sandbox import Limits, Sandbox, SandboxBackend, SandboxLost, SandboxSpec

METHODS = ("start", "stop", "exec", "read", "write", "renew", "report")
KEEP_S = 3600.0  # a placement that was stopped before its start arrived is not started any more


class Agent:
    """Blocking verbs of a backend run in threads. `start` and `stop` may come in any order and any number of times."""

    def __init__(self, backend: SandboxBackend, capacity: list[int] | None = None, threads: int = 64):
        self.backend, self.capacity = backend, capacity or machine()
        self.sandboxes: dict[int, Sandbox] = {}
        self.stopped: dict[int, float] = {}
        self.images: set[str] = set()
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="agent")

    async def _run(self, call, *arguments, **options):
        return await asyncio.get_running_loop().run_in_executor(self.pool, lambda: call(*arguments, **options))

    async def start(
        self, placement: int, image: str, peak: list[int], lease_s: float, start_s: float, fork: int | None = None
    ) -> None:
        """A sandbox that answers commands; its limits are those of the shape's peak."""
        await self._run(self._start, placement, image, peak, lease_s, start_s, fork)

    def _start(self, placement, image, peak, lease_s, start_s, fork):
        cpu, memory, disk, pids = peak
        limits = Limits(
            cpus=max(0.001, cpu / 1000), memory_bytes=max(1, memory) * MIB, disk_bytes=max(1, disk) * MIB, pids=max(1, pids)
        )
        if fork is not None:
            made = self._sandbox(fork).fork()
            made.renew(lease_s)
        else:
            made = self.backend.create(SandboxSpec(image=image, limits=limits, lease_s=lease_s, start_s=start_s))
        with self.lock:
            late = placement in self.stopped or placement in self.sandboxes
            if not late:
                self.sandboxes[placement] = made
                self.images.add(image)
        if late:
            made.destroy()
            raise SandboxLost(f"placement {placement} was stopped before it started")

    def _sandbox(self, placement: int) -> Sandbox:
        sandbox = self.sandboxes.get(placement)
        if sandbox is None:
            raise SandboxLost(f"placement {placement} is not here")
        return sandbox

    async def stop(self, placement: int) -> None:
        """Nothing of it is left, and nothing will come."""
        now = time.monotonic()
        with self.lock:
            sandbox = self.sandboxes.pop(placement, None)
            self.stopped = (
                {key: when for key, when in self.stopped.items() if when > now - KEEP_S}
                if len(self.stopped) > 10_000
                else self.stopped
            )
            self.stopped[placement] = now
        if sandbox is not None:
            await self._run(sandbox.destroy)

    async def exec(self, placement: int, command, **options) -> dict:
        return vars(await self._run(self._sandbox(placement).exec, command, **options))

    async def read(self, placement: int, path: str, **options) -> bytes:
        return await self._run(self._sandbox(placement).read, path, **options)

    async def write(self, placement: int, path: str, data: bytes, **options) -> None:
        await self._run(self._sandbox(placement).write, path, data, **options)

    async def renew(self, placement: int, lease_s: float) -> None:
        await self._run(self._sandbox(placement).renew, lease_s)

    async def report(self) -> dict:
        """Capacity, live use, placements that are alive, images. A sandbox that ended by itself is taken off."""

        def alive() -> list[int]:
            for placement, sandbox in list(self.sandboxes.items()):
                try:
                    sandbox.check()
                except SandboxLost:
                    with self.lock:
                        self.sandboxes.pop(placement, None)
            return list(self.sandboxes)

        placements = await self._run(alive)
        return {"capacity": self.capacity, "live": live(), "alive": placements, "images": sorted(self.images)}

    def close(self):
        self.backend.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


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
