"""Stop every process of a sandbox for a moment: version 2's cgroup.freeze, or version 1's freezer, joined when it is needed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl.environments.cgroups import TOP, Layout
from rl.environments.sandbox import SnapshotError

FREEZE_S = 5.0


@contextmanager
def frozen(layout: Layout, name: str) -> Iterator[None]:
    """Nothing of sandbox `name` runs inside this block; SnapshotError where the machine cannot do that."""
    if layout.version == 2:
        group = layout.group("pids", name)
        state, freeze, thaw = group / "cgroup.freeze", "1", "0"
    else:
        group = _freezer_mount() / TOP / layout.node / name
        group.mkdir(parents=True, exist_ok=True)
        state, freeze, thaw = group / "freezer.state", "FROZEN", "THAWED"
    try:
        state.write_text(freeze)
        _wait(layout, name, group)
        yield
    finally:
        state.write_text(thaw)
        if layout.version == 1:
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    (group.parent.parent.parent / "cgroup.procs").write_text(pid)
            with suppress(OSError):
                group.rmdir()
                group.parent.rmdir()


def _wait(layout: Layout, name: str, group: Path) -> None:
    end = time.monotonic() + FREEZE_S
    while time.monotonic() < end:
        if layout.version == 2:
            if "frozen 1" in (group / "cgroup.events").read_text():
                return
        else:
            joined = set((group / "cgroup.procs").read_text().split())
            new = [str(pid) for pid in layout.processes(name) if str(pid) not in joined]
            for pid in new:  # what they start from now on is born frozen
                with suppress(ProcessLookupError):
                    (group / "cgroup.procs").write_text(pid)
            if not new and (group / "freezer.state").read_text().strip() == "FROZEN":
                return
        time.sleep(0.0005)
    raise SnapshotError("the sandbox's processes could not be frozen")


def _freezer_mount() -> Path:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, directory, kind, options, *_ = line.split()
        if kind == "cgroup" and "freezer" in options.split(","):
            return Path(directory)
    raise SnapshotError("this machine has no freezer: a snapshot needs a sandbox in which nothing runs")
