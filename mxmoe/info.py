"""What this installation is and can do: versions, CPU, devices, and the table verb x backend x format (`mxmoe info`).

The table is made from each backend's `SUPPORTS`; the README holds a copy, which a test compares.
"""

import os
import platform
from importlib import metadata
from pathlib import Path

import numpy
import torch

import mxmoe
from mxmoe import backends
from mxmoe.backends import cuda, triton

VERBS = (
    "quantize", "dequantize", "swizzle_scales", "route", "route_backward", "sort_by_expert", "permute", "unpermute",
    "unpermute_backward", "grouped_mm", "grouped_mm_wgrad", "swiglu", "swiglu_backward", "moe_decode",
)  # fmt: skip
FORMATS = ("fp32", "bf16", "fp16", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "int32")


def support() -> tuple[dict[str, frozenset[tuple[str, str]]], dict[str, str]]:
    """(SUPPORTS of every backend that is usable here, the reason for every one that is not)."""
    usable, missing = {}, {}
    for name in backends.BACKENDS:
        try:
            usable[name] = backends.get(name).SUPPORTS
        except ImportError as error:
            missing[name] = str(error)
    return usable, missing


def table(supports: dict[str, frozenset[tuple[str, str]]]) -> str:
    """Markdown: a row per verb, a column per format; a cell has the initials of the backends that do that verb in that format."""
    cells = [["verb", *FORMATS]]
    for verb in VERBS:
        backends_of = [[name[0].upper() for name, pairs in supports.items() if (verb, format) in pairs] for format in FORMATS]
        cells.append([f"`{verb}`", *(" ".join(initials) or "-" for initials in backends_of)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def cpu_model() -> str:
    """The CPU's own name, from /proc/cpuinfo, else its architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.machine()


def gpus() -> list[str]:
    """Each GPU of this machine, with the architecture whose kernels it runs or what it lacks."""
    found = []
    for i in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(i)
        try:
            found.append(f"{name} ({cuda.arch_of(name, torch.cuda.get_device_capability(i))})")
        except NotImplementedError as error:
            found.append(f"{name} (triton alone: {error})")
    return found


def kernels() -> str:
    """Where the GPU kernels are, or why they are not."""
    try:
        module = cuda.module()
    except ImportError as error:
        return str(error)
    return f"kernels {module.__file__}, {module.device_count()} devices"


def compiler() -> str:
    """What compiles the Triton backend's kernels when they are first launched, or why nothing does."""
    try:
        triton.loaded()
    except ImportError as error:
        return str(error)
    return f"kernels of {Path(triton.__file__).parent} are compiled by Triton {metadata.version('triton')}"


def driver() -> str:
    """The CUDA version of the driver, as cuda-python tells it."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return "unknown without cuda-python"
    try:
        error, version = driver.cuDriverGetVersion()
    except RuntimeError:  # the library of the driver is not there
        return "none"
    return f"CUDA {version // 1000}.{version % 1000 // 10}" if error == driver.CUresult.CUDA_SUCCESS and version else "none"


def report() -> str:
    """The text of `mxmoe info`."""
    usable, missing = support()
    lines = [
        f"mxmoe    {mxmoe.__version__} in {Path(mxmoe.__file__).parent}",
        f"python   {platform.python_version()}   torch {torch.__version__}   numpy {numpy.__version__}",
        f"cpu      {cpu_model()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        f"devices  {', '.join(['cpu', *gpus()])}",
        f"cuda     {kernels()}; driver: {driver()}",
        f"triton   {compiler()}",
    ]
    gpu = backends.fast("cuda")
    why = "" if "cuda" in gpu else f" (not cuda: {cuda.lacks()})"
    lines.append(
        f"auto     cpu: {backends.fast('cpu')[0]}; GPU: the first of {', '.join(gpu)} that has the verb in the format{why}"
    )
    if "host" in usable:
        from mxmoe import _C

        isas = _C.isas()
        lines.append(f"isa      {_C.default_isa()} (runs here: {', '.join(isas)}); core {_C.__file__}")
    lines += [f"{name}: {reason}" for name, reason in missing.items()]
    legend = ", ".join(f"{name[0].upper()} {name}" for name in usable)
    return "\n".join([*lines, "", table(usable), "", f"{legend}, - none"])
