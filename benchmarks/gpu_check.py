"""Builds the GPU kernels, compares a GPU backend with the reference and times it against torch, in under six minutes:

    python -m benchmarks.gpu_check
    python -m benchmarks.gpu_check --backend triton

cuda: on a machine with a Hopper or Blackwell GPU, torch with CUDA and nvcc 13; triton: with any GPU that torch and Triton use; no
network. Writes benchmarks/results/<gpu>-<commit>.json, of triton <gpu>-triton-<commit>.json. Exit status 0: everything there is
holds; 1: something does not; 2: this machine lacks what it says.
"""

import argparse
import importlib.util
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks import machine

BUDGET = 345.0  # seconds in all
SILENCE = 40.0  # seconds after which a job counts as hanging
FIRST = 90.0  # until a new process has started its first job
CAPABILITIES = ((9, 0), (10, 0), (10, 3))
MODULES = ("pybind11", "numpy", "safetensors", "setuptools")


def lacks(backend: str = "cuda") -> list[str]:
    """What this machine has not."""
    missing = [f"Python's {name}" for name in MODULES if importlib.util.find_spec(name) is None]
    missing += [
        f"{tool} on PATH" for tool in ("cmake", "ninja") if shutil.which(tool) is None and importlib.util.find_spec(tool) is None
    ]
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        missing.append("Triton: pip install 'triton>=3.6'")
    if backend == "cuda" and ((nvcc := nvcc_version()) is None or nvcc < (13, 0)):
        missing.append(f"nvcc 13.0 or newer, got {'none' if nvcc is None else '.'.join(map(str, nvcc))}")
    try:
        import torch
    except ImportError:
        return [*missing, "torch 2.11 or newer with CUDA"]
    if not torch.cuda.is_available():
        built = torch.version.cuda or "the CPU"
        return [
            *missing,
            f"a GPU that torch can use: torch {torch.__version__} is built for {built} and sees {torch.cuda.device_count()}",
        ]
    if backend == "cuda" and (capability := torch.cuda.get_device_capability()) not in CAPABILITIES:
        major, minor = capability
        missing.append(f"a Hopper or Blackwell GPU, got {torch.cuda.get_device_name()} of compute capability {major}.{minor}")
    return missing


def nvcc_version() -> tuple[int, int] | None:
    compiler = shutil.which("nvcc") or shutil.which(
        "nvcc", path=os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    )
    if compiler is None:
        return None
    found = re.search(
        r"release (\d+)\.(\d+)", subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    )
    return (int(found[1]), int(found[2])) if found else None


def build(backend: str, timeout: float) -> float:
    """Builds in place; seconds."""
    start = time.monotonic()
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = os.environ | ({"MXMOE_CUDA": "ON"} if backend == "cuda" else {})
    subprocess.run(command, cwd=machine.ROOT, env=environment, check=True, timeout=timeout)
    return time.monotonic() - start


def run_jobs(command: list[str], deadline: float, silence: float = SILENCE, first: float = FIRST) -> dict[str, dict]:
    """Results by job. A process that dies or hangs costs the job it was at; another goes on with the rest until the deadline."""
    results: dict[str, dict] = {}
    while time.monotonic() < deadline:
        before = len(results)
        finished = _run_process(command, results, deadline, silence, first)
        if finished or len(results) == before:
            break
    return results


def _run_process(command: list[str], results: dict[str, dict], deadline: float, silence: float, first: float) -> bool:
    """Adds what one process does; whether it came to its end by itself and did something or had nothing to do."""
    process = subprocess.Popen(command, cwd=machine.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write(json.dumps(list(results)))
    process.stdin.close()
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
    current, wait = None, first
    try:
        while (line := lines.get(timeout=max(0.1, min(wait, deadline - time.monotonic())))) is not None:
            entry, wait = json.loads(line), silence
            current = entry.pop("name")
            if entry["outcome"] != "started":
                results[current] = entry
                show(current, entry)
                current = None
    except queue.Empty:
        note = "out of time" if time.monotonic() >= deadline else f"nothing for {wait:.0f} s"
    else:
        note = f"the process ended with status {process.wait()}"
    finally:
        process.kill()
        process.wait()
    if current is not None:
        results[current] = {"outcome": "hangs" if note.startswith("nothing") else "error", "note": note}
        show(current, results[current])
    return current is None and process.returncode == 0


def _forward(source, lines: queue.Queue[str | None]):
    """Every line as it comes; None at the end."""
    for line in iter(source.readline, ""):
        lines.put(line)
    lines.put(None)


def show(name: str, entry: dict):
    if entry["outcome"] == "measured":
        verdict = {True: "holds", False: "DOES NOT HOLD", None: ""}[entry["holds"]]
        print(f"{name}: {entry['measured']:.4g} {entry['unit']} {verdict}".rstrip(), flush=True)
    elif entry["outcome"] not in ("equal", "no kernel"):
        print(f"{name}: {entry['outcome']}: {entry.get('note', '')}", flush=True)


def document(gpu: str, backend: str, facts: dict, results: dict[str, dict]) -> dict:
    """What is written: the machine, the cases of conformance counted by outcome with what is wrong, and the measured rows."""
    cases = {name.removeprefix("conformance: "): r for name, r in results.items() if name.startswith("conformance: ")}
    outcomes = [r["outcome"] for r in cases.values()]
    return {
        "gpu": gpu,
        "backend": backend,
        **facts,
        "conformance": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        "failures": {name: r for name, r in cases.items() if r["outcome"] not in ("equal", "no kernel")},
        "speed": {name.removeprefix("speed: "): r for name, r in results.items() if name.startswith("speed: ")},
    }


def holds(written: dict) -> bool:
    bad = [name for name, r in written["speed"].items() if r.get("holds") is False or r["outcome"] in ("wrong", "error", "hangs")]
    return not bad and not written["failures"] and bool(written["conformance"].get("equal"))


def write(directory: Path, written: dict) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", written["gpu"].lower()).strip("-")
    backend = "" if written["backend"] == "cuda" else f"-{written['backend']}"
    path = directory / f"{name}{backend}-{written['commit'].rstrip('+')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n")
    return path


def driver_facts() -> dict:
    """What the driver says, by cuda-python where it is installed."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return {}
    driver.cuInit(0)
    names = {"sms": "MULTIPROCESSOR_COUNT", "shared_bytes": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "l2_bytes": "L2_CACHE_SIZE",
             "memory_khz": "MEMORY_CLOCK_RATE", "bus_bits": "GLOBAL_MEMORY_BUS_WIDTH"}  # fmt: skip
    kinds = driver.CUdevice_attribute
    facts = {k: driver.cuDeviceGetAttribute(getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{n}"), 0)[1] for k, n in names.items()}
    return {"driver": driver.cuDriverGetVersion()[1], **facts}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("cuda", "triton"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--no-build", action="store_true", help="the kernels are built already")
    parser.add_argument("--results", type=Path, default=machine.ROOT / "benchmarks" / "results", metavar="DIRECTORY")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="for everything (default: %(default)s)")
    arguments = parser.parse_args(argv)
    backend = arguments.backend
    if missing := lacks(backend):
        print("gpu_check needs, and this machine lacks:", *missing, sep="\n  ", file=sys.stderr)
        return 2
    import torch

    start = time.monotonic()
    build_seconds = None if arguments.no_build else round(build(backend, arguments.budget), 1)
    print(f"{torch.cuda.get_device_name()}; built in {build_seconds} s", flush=True)
    results = run_jobs([sys.executable, "-m", "benchmarks.gpu.jobs", backend], start + arguments.budget)
    major, minor = torch.cuda.get_device_capability()
    facts = {"capability": f"{major}.{minor}", "torch": torch.__version__, "python": sys.version.split()[0],
             "commit": machine.commit(), "build_seconds": build_seconds, **driver_facts()}  # fmt: skip
    facts["seconds"] = round(time.monotonic() - start, 1)
    written = document(torch.cuda.get_device_name(), backend, facts, results)
    print(f"conformance: {written['conformance']}; wrote {write(arguments.results, written)}")
    return 0 if holds(written) else 1


if __name__ == "__main__":
    sys.exit(main())
