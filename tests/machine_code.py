"""What the GPU kernels became: registers, shared memory, spills and the instructions that matter, from the built objects.

`python -m tests.machine_code` writes csrc/cuda/machine_code.txt anew. Needs cuobjdump and nvdisasm, on PATH or from the packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, or Triton's.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "csrc" / "cuda" / "machine_code.txt"
# Tensor cores, tensor memory, asynchronous copies, barriers, conversions, vector accesses; local memory is a spill.
SHOWN = re.compile(
    r"U(?:TC|TMA|CGABAR)\w+|LDTM|UBLKCP|HGMMA|HMUL2|WARPGROUP|HMMA|QMMA|F2FP|SYNCS|LDL|STL|MUFU|ATOMG|MATCH|"
    r"(?:LDG|STG|LDS|STS|REDG?)(?=\.)"
)


def objects() -> list[Path]:
    """Device objects of the last build, in name order."""
    directory = ROOT / "build" / f"cmake-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    return sorted(directory.glob("CMakeFiles/_cuda.dir/csrc/cuda/*.cu.o"))


def tools() -> str | None:
    """A PATH on which cuobjdump and nvdisasm are, or None."""
    packages = []
    for package, directory in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        packages += [str(Path(p) / directory) for p in (spec.submodule_search_locations if spec else [])]
    path = os.pathsep.join([*packages, os.environ.get("PATH", "")])
    return path if all(shutil.which(tool, path=path) for tool in ("cuobjdump", "nvdisasm")) else None


def dump(path: Path, what: str) -> str:
    command = [shutil.which("cuobjdump", path=tools()), what, path]
    return subprocess.run(command, env=os.environ | {"PATH": tools()}, capture_output=True, text=True, check=True).stdout


def short(symbol: str) -> str:
    """_ZN..entryINS0_8quantize10launchableINS2_6configINS_4E4M3ELNS2_5InputE1E... -> quantize<E4M3, 1>."""
    length, rest = re.search(r"entryINS0_(\d+)(\w+)", symbol).groups()
    name = rest[: int(length)]
    parameters = re.findall(r"NS_\d(E\dM\d)|(NoCopies)|L(?:NS\d?_\w+?E|S\w_|[bij])(\d+)E", symbol.partition("configI")[2])
    return f"{name}<{', '.join(a or b or c for a, b, c in parameters)}>"


def kernels(path: Path) -> dict[tuple[str, str], dict]:
    """(architecture, kernel) -> registers, shared (static) and stack bytes, and the counts of the instructions shown."""
    found = {}
    for part in dump(path, "-res-usage").split("Fatbin elf code:")[1:]:
        arch = re.search(r"arch = (\S+)", part)[1].rstrip("f")
        for symbol, registers, stack, local in re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", part):
            found[arch.rstrip("a"), symbol] = {"registers": int(registers), "spilled": int(stack) + int(local), "code": Counter()}
    arch = symbol = ""
    for line in dump(path, "-sass").splitlines():
        if match := re.search(r"code for (sm_\d+)", line):
            arch = match[1]
        elif match := re.search(r"Function : (\w+)", line):
            symbol = match[1]
        match = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", line)
        if match and SHOWN.match(match[1]):
            found[arch, symbol]["code"][match[1]] += 1
    return {(arch, short(symbol)): facts for (arch, symbol), facts in found.items()}


def table() -> str:
    lines = ["# kernel, architecture: registers; instructions (python -m tests.machine_code)"]
    for path in objects():
        for (arch, name), facts in sorted(kernels(path).items()) if path.stem != "launcher.cu" else ():
            code = ", ".join(f"{count} {op}" for op, count in sorted(facts["code"].items()))
            lines.append(f"{name}, {arch}: {facts['registers']} registers, {facts['spilled']} bytes spilled; {code}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table())
