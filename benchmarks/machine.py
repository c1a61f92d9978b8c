"""What a measurement depends on: which machine, which commit, and whether other processes were using the machine."""

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 0.4  # seconds
MAX_OTHERS = 0.15  # cores that other processes may use while we measure; a background service stays below


def describe() -> str:
    """Processor, cores and memory, e.g. 'AMD EPYC 9R14, 2 cores, 24 GiB, avx512'."""
    from mxmoe import _C

    names = [line.split(":", 1)[1].strip() for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {_C.isas()[-1]}"


def conditions() -> str:
    """All that a table of times depends on, in one line."""
    import torch

    pages = f"THP_MEM_ALLOC_ENABLE={os.environ.get('THP_MEM_ALLOC_ENABLE', '0')} for all providers"
    return f"{describe()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {pages}, commit {commit()}"


def commit() -> str:
    """Short hash of HEAD, with '+' where tracked files differ from it; 'unknown' outside a repository."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass(frozen=True)
class CpuTime:
    """Seconds of processor time since boot: of everything, and of this process and its finished children."""

    busy: float
    own: float
    wall: float

    @staticmethod
    def now() -> "CpuTime":
        fields = [int(f) for f in _read("/proc/stat").splitlines()[0].split()[1:9]]
        idle = fields[3] + fields[4]  # idle, waiting for a disk; the last of the eight is time that another guest stole
        tick = os.sysconf("SC_CLK_TCK")
        return CpuTime((sum(fields) - idle) / tick, sum(os.times()[:4]), time.monotonic())


def others_between(before: CpuTime, after: CpuTime) -> float:
    """Cores that other processes used on average between two readings."""
    wall = max(after.wall - before.wall, 1e-9)
    return max(0.0, (after.busy - before.busy) - (after.own - before.own)) / wall


def cores_used_by_others(window: float = WINDOW) -> float:
    """The same over a window in which this process sleeps."""
    before = CpuTime.now()
    time.sleep(window)
    return others_between(before, CpuTime.now())


def is_busy() -> bool:
    return cores_used_by_others() > MAX_OTHERS


def _read(path: str) -> str:
    return Path(path).read_text()


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return run.stdout.strip()
