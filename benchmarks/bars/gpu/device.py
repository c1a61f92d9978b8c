"""The kernels as nvcc compiles them, and what `python -m benchmarks.gpu_check` measured of them on a GPU."""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks import gpu_check
from benchmarks.bars import suite
from benchmarks.bars.harness import Bar, NotMeasured, Run
from benchmarks.machine import ROOT
from tests import machine_code


def spilled(run: Run) -> float:
    """Bytes of registers that any kernel keeps in local memory."""
    if not machine_code.objects() or not machine_code.tools():
        raise NotMeasured("needs a build with nvcc, cuobjdump and nvdisasm")
    kernels = [facts for path in machine_code.objects() for facts in machine_code.kernels(path).values()]
    run.note(f"{len(kernels)} kernels")
    return sum(facts["spilled"] for facts in kernels)


def build_seconds(target: str, run: Run) -> float:
    """Configures and compiles every source of one extension anew, two at a time."""
    cuda = target == "_cuda"
    if cuda and gpu_check.nvcc_version() is None:
        raise NotMeasured("needs nvcc")
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as directory:
        configure = ["cmake", "-S", ROOT, "-B", directory, "-G", "Ninja", f"-DMXMOE_CUDA={'ON' if cuda else 'OFF'}",
                     f"-Dpybind11_DIR={pybind11}", f"-DPython_EXECUTABLE={sys.executable}"]  # fmt: skip
        start = time.monotonic()
        for command in (configure, ["cmake", "--build", directory, "--target", target, "-j", "2"]):
            subprocess.run(command, capture_output=True, check=True, env=os.environ)
        return time.monotonic() - start


def make_seconds(target: str, run: Run) -> float:
    """A target of the Makefile, from a tree that is built; one that fails is no measurement."""
    start = time.monotonic()
    done = subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True, check=False)
    run.note(next((line for line in reversed(done.stdout.splitlines()) if "passed" in line), "no tests ran"))
    if done.returncode:
        raise RuntimeError(f"make {target} failed: {done.stdout.strip().splitlines()[-1:]}")
    return time.monotonic() - start


def measured_on_gpu(backend: str) -> tuple[Path, dict]:
    """The newest results of gpu_check of this backend."""
    results = ROOT / "benchmarks" / "results"
    read = [(path, json.loads(path.read_text())) for path in results.glob("*.json")]
    found = [(path, content) for path, content in read if "conformance" in content and content.get("backend", "cuda") == backend]
    if not found:
        raise NotMeasured(f"no GPU; `python -m benchmarks.gpu_check --backend {backend}` on a machine with one")
    return max(found, key=lambda entry: entry[0].stat().st_mtime)


def conformance_on_gpu(backend: str, run: Run) -> float:
    path, content = measured_on_gpu(backend)
    run.note(path.name)
    return len(content["failures"])


def speed_on_gpu(name: str, run: Run, backend: str = "cuda") -> float:
    path, content = measured_on_gpu(backend)
    run.note(path.name)
    row = content["speed"].get(name, {"outcome": "not run"})
    if row["outcome"] != "measured":
        raise NotMeasured(f"{name}: {row['outcome']} {row.get('note', '')}".rstrip())
    return row["measured"]


BARS = [
    Bar("registers spilled", "<=", 0, "bytes", spilled),
    Bar("opcodes of every kernel, and the committed table", "<=", 0, "failing tests",
        partial(suite.failing, ("tests/test_machine_code.py",))),
    Bar("device build on 2 cores", "<", 240, "s", partial(build_seconds, "_cuda"), kind="time", long=True),
    Bar("interpreter build on 2 cores", "<=", 120, "s", partial(build_seconds, "_interp"), kind="time", long=True),
    Bar("make test, built, on 2 cores", "<", 660, "s", partial(make_seconds, "test"), kind="time", long=True),
    Bar("make test-deep, on 2 cores", "<", 3600, "s", partial(make_seconds, "test-deep"), kind="time", long=True),
    Bar("on a GPU: conformance", "<=", 0, "wrong results", partial(conformance_on_gpu, "cuda")),
    Bar("on a GPU: quantize mxfp8", ">=", 0.8, "x copy bandwidth", partial(speed_on_gpu, "quantize mxfp8 row")),
    Bar("on a GPU: grouped_mm bf16", ">=", 0.9, "x torch._grouped_mm", partial(speed_on_gpu, "grouped_mm bf16")),
    Bar("on a GPU: moe_decode mxfp8", ">=", 0.6, "x copy bandwidth", partial(speed_on_gpu, "moe_decode mxfp8")),
    Bar("on a GPU: forward and backward", "<=", 0, "copies to the host", partial(speed_on_gpu, "host copies of a step, mxfp8")),
]  # fmt: skip
