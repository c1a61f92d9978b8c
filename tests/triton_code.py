"""What Triton makes of the kernels of mxmoe/backends/triton, without a GPU: every launch of every verb (tests/triton_launches.py)
compiled for an architecture: registers, spills, shared memory and the instructions that matter.

`python -m tests.triton_code` writes mxmoe/backends/triton/machine_code.txt anew. Needs Triton, whose wheels bring ptxas, cuobjdump
and nvdisasm. What the same Triton made before of the same source is read from build/triton_code.
"""

import hashlib
import json
import multiprocessing
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests import machine_code
from tests.triton_launches import Launch, launches

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "mxmoe" / "backends" / "triton" / "machine_code.txt"
CACHE = ROOT / "build" / "triton_code"
ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
PTX = re.compile(
    r"\b(tcgen05\.mma[\w.:]*|wgmma\.mma_async\.sync\.aligned\.[\w.]*|mma\.sync\.aligned\.[\w.:]*|div\.\w+\.f32|fma\.\w+\.f32|"
    r"atom\.[\w.]*|ex2\.[\w.]*|\w+\.ftz\.f32)"
)
SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?((?:HGMMA|UTC\w*MMA|HMMA|QMMA|OMMA|LDL|STL)[\w.]*)", re.M)
# Where every launch is compiled; elsewhere one of each kernel and configuration, of products per format.
EVERY = ("sm_90", "sm_100")


@cache
def known_launches(arch: str) -> list[Launch]:
    found: dict[object, Launch] = {}
    for launch in launches(arch):
        formats = [launch.constants.get(k) for k in ("MAX_A", "MAX_B", "NVFP4_A", "NVFP4_B")]
        found.setdefault(launch.name if arch in EVERY else (launch.kernel, launch.config, *formats), launch)
    return list(found.values())


def compiled(launch: Launch, target: GPUTarget):
    """What triton.compile gives; Triton's own cache does not learn of it."""
    attributes = {(i,): [["tt.divisibility", 16]] for i in launch.aligned}
    source = ASTSource(fn=launch.kernel, signature=launch.signature, constexprs=launch.constants, attrs=attributes)
    with tempfile.TemporaryDirectory() as directory, triton.knobs.cache.scope():
        triton.knobs.cache.dir = directory
        return triton.compile(source, target=target, options={"enable_fp_fusion": False, **launch.options})


def facts(launch: Launch, arch: str) -> dict:
    """registers, spilled bytes, shared bytes, and how often each instruction is in its PTX and its SASS."""
    told = (triton.__version__, launch.kernel.cache_key, launch.signature, launch.constants, launch.aligned, launch.options, arch)
    key = hashlib.sha256(repr((*told, PTX.pattern, SASS.pattern)).encode()).hexdigest()
    stored = CACHE / f"{key}.json"
    if not stored.exists():
        code = compiled(launch, GPUTarget("cuda", int(arch[3:]), 32))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code.asm["cubin"])
            file.flush()
            usage, sass = (machine_code.dump(Path(file.name), what) for what in ("-res-usage", "-sass"))
        registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage).groups())
        found = {"registers": registers, "spilled": stack + local, "shared": code.metadata.shared,
                 "ptx": Counter(PTX.findall(code.asm["ptx"])), "sass": Counter(SASS.findall(sass))}  # fmt: skip
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = stored.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found))
        partial.replace(stored)
    return json.loads(stored.read_text())


def _facts_of(arch: str, i: int) -> tuple[str, str, str, dict]:
    launch = known_launches(arch)[i]
    try:
        return launch.name, launch.config, arch, facts(launch, arch)
    except Exception as error:  # of many compilers
        raise RuntimeError(f"{launch.name}, {launch.config} on {arch}: {error}") from error


@contextmanager
def all_facts(archs=ARCHS) -> Iterator[Iterator[tuple[str, str, str, dict]]]:
    """(launch, configuration, architecture, facts) of all, on all cores."""
    of_each = [range(len(known_launches(arch))) for arch in archs]
    pairs = [(arch, i) for arch, indices in zip(archs, of_each, strict=True) for i in indices]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), context) as pool:
        yield pool.map(_facts_of, *zip(*pairs, strict=True))


def table(found: list[tuple[str, str, str, dict]]) -> str:
    """A line per launch, and a line below for each architecture."""
    lines = [f"# Triton {triton.__version__}: kernel; architecture: configuration: what became of it (python -m tests.triton_code)"]
    of_launch: dict[str, list[str]] = {launch.name: [] for launch in known_launches(EVERY[0])}
    for name, config, arch, f in found:
        code = ", ".join(f"{count} {op}" for which in ("ptx", "sass") for op, count in sorted(f[which].items()))
        facts = f"{f['registers']} registers, {f['spilled']} bytes spilled, {f['shared']} shared"
        of_launch.setdefault(name, []).append(f"  {arch}: {config}: {facts}{'; ' if code else ''}{code}")
    for name, of_archs in of_launch.items():
        lines += [name, *of_archs]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with all_facts() as found:
        TABLE.write_text(table(list(found)))
