"""Memory, process and CPU limits by cgroups: which files of version 1 or 2 mean what, and where.

    layout = find()                       # this machine's: v2, v1, or a hybrid with the v1 controllers
    layout.fields("17", limits)           # what the launcher creates, sets and joins for sandbox 17
    layout.oom_kills("17")                # how often the kernel killed for memory there

Every group is below `anyrun/<node>/` of its hierarchy, and a node removes those of nodes that are gone when it starts.
"""

import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rl.environments.sandbox import Limits

TOP = "anyrun"
PERIOD_US = 100_000
NEEDED = {"memory": "memory_limit", "pids": "pids_limit", "cpu": "cpu_limit"}  # controller: the promise it keeps


@dataclass(frozen=True)
class Layout:
    """Where the controllers are: {controller: directory its groups are made in}; the same one for all in version 2."""

    version: int
    mounts: dict[str, Path] = field(default_factory=dict)
    node: str = ""

    def missing(self) -> dict[str, str]:
        """Promises that cannot be kept: {promise: why}."""
        reasons = {}
        for controller, promise in NEEDED.items():
            mount = self.mounts.get(controller)
            if mount is None:
                reasons[promise] = f"no {controller} cgroup controller"
            elif not os.access(mount, os.W_OK):
                reasons[promise] = f"{mount} cannot be written"
        return reasons

    def with_node(self, node: str) -> "Layout":
        """Make the node's groups. A controller that refuses is left out, and so missing."""
        usable = {}
        for controller, mount in self.mounts.items():
            with suppress(OSError):
                (mount / TOP / node).mkdir(parents=True, exist_ok=True)
                if self.version == 2:
                    for directory in (mount, mount / TOP, mount / TOP / node):
                        (directory / "cgroup.subtree_control").write_text(f"+{controller}")
                usable[controller] = mount
        return Layout(self.version, usable, node)

    def group(self, controller: str, name: str) -> Path:
        return self.mounts[controller] / TOP / self.node / name

    def fields(self, name: str, limits: Limits) -> list[str]:
        """`c:` a group to make and join, `s:` what to write into it before."""
        memory, pids = limits.memory_bytes + limits.disk_bytes, limits.pids + 2  # + the first process and a supervisor
        quota = max(1000, int(limits.cpus * PERIOD_US))
        if self.version == 2:
            settings = {
                "memory": [f"memory.max={memory}", "memory.swap.max=0"],
                "pids": [f"pids.max={pids}"],
                "cpu": [f"cpu.max={quota} {PERIOD_US}"],
            }
        else:
            settings = {
                "memory": [f"memory.limit_in_bytes={memory}"],
                "pids": [f"pids.max={pids}"],
                "cpu": [f"cpu.cfs_quota_us={quota}"],
            }
        groups: dict[Path, list[str]] = {}
        for controller in self.mounts:
            wanted = [text for text in settings[controller] if "swap" not in text or self._has_swap_limit()]
            groups.setdefault(self.group(controller, name), []).extend(wanted)
        return [text for group, values in groups.items() for text in (f"c:{group}", *(f"s:{value}" for value in values))]

    def _has_swap_limit(self) -> bool:
        return (self.mounts["memory"] / TOP / self.node / "memory.swap.max").exists()

    def oom_kills(self, name: str) -> int:
        if "memory" not in self.mounts:
            return 0
        text = (self.group("memory", name) / ("memory.events" if self.version == 2 else "memory.oom_control")).read_text()
        found = re.search(r"^oom_kill (\d+)", text, re.M)
        return int(found[1]) if found else 0

    def memory_bytes(self, name: str) -> int:
        """What a sandbox uses now, its files and the kernel's part included."""
        file = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        return int((self.group("memory", name) / file).read_text())

    def processes(self, name: str) -> list[int]:
        """Process ids in a sandbox, as the host counts them."""
        return [int(line) for line in (self.group("pids", name) / "cgroup.procs").read_text().split()]

    def remove_node(self) -> None:
        for mount in set(self.mounts.values()):
            remove_tree(mount / TOP / self.node)


def find(mounts_text: str | None = None) -> Layout:
    """The layout of this machine, from /proc/self/mounts."""
    text = Path("/proc/self/mounts").read_text() if mounts_text is None else mounts_text
    v1, v2 = {}, {}
    for _, directory, kind, options, *_ in (line.split() for line in text.splitlines()):
        if kind == "cgroup":
            v1 |= {option: Path(directory) for option in options.split(",") if option in NEEDED}
        elif kind == "cgroup2":
            controllers = Path(directory) / "cgroup.controllers"
            if controllers.exists():
                v2 |= {name: Path(directory) for name in controllers.read_text().split() if name in NEEDED}
    return Layout(2, v2) if len(v2) >= len(v1) and v2 else Layout(1, v1)


def remove_stale(layout: Layout, alive) -> int:
    """Remove the groups of nodes for which `alive(name)` is false; how many."""
    removed = 0
    for mount in set(layout.mounts.values()):
        with suppress(FileNotFoundError):
            for node in [entry for entry in (mount / TOP).iterdir() if entry.is_dir() and not alive(entry.name)]:
                remove_tree(node)
                removed += 1
    return removed


def remove_tree(group: Path) -> None:
    """Remove a group and those below it, ending what still runs in them."""
    if not group.is_dir():
        return
    for child in group.iterdir():
        if child.is_dir():
            remove_tree(child)
    for _ in range(200):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            with suppress(OSError, ProcessLookupError):
                for pid in (group / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.005)
