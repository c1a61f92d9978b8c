"""`python -m benchmarks.gpu_check` where there is no GPU: what it says, and its parts on jobs made up for the purpose."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import gpu_check
from benchmarks.bars import gpu as gpu_bars
from benchmarks.bars.harness import Run, measure
from benchmarks.gpu import conformance, jobs, speed
from mxmoe import backends
from mxmoe.backends import device, interpreter
from tests import conformance as shared
from tests import interpreter_cases

CHILD = """
import json, os, sys, time
done = json.load(sys.stdin)
for name in ("good", "dies", "hangs", "last"):
    if name not in done:
        print(json.dumps({"name": name, "outcome": "started"}), flush=True)
        if name == "dies":
            os._exit(3)
        if name == "hangs":
            time.sleep(60)
        print(json.dumps({"name": name, "outcome": "equal"}), flush=True)
"""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
FACTS = {"commit": "abc123+", "build_seconds": 1.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_it_says_what_the_machine_lacks(backend, capsys):
    assert gpu_check.main(["--backend", backend]) == 2
    text = capsys.readouterr().err
    assert text.startswith("gpu_check needs, and this machine lacks:")
    assert "a GPU that torch can use" in text


@pytest.mark.parametrize(("found", "text"), [(None, "got none"), ((12, 9), "got 12.9")])
def test_an_old_or_absent_compiler_is_named(monkeypatch, found, text):
    monkeypatch.setattr(gpu_check, "nvcc_version", lambda: found)
    assert f"nvcc 13.0 or newer, {text}" in gpu_check.lacks()
    assert not [line for line in gpu_check.lacks("triton") if "nvcc" in line]


def test_absent_triton_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else True)
    assert "Triton: pip install 'triton>=3.6'" in gpu_check.lacks("triton")
    assert not [line for line in gpu_check.lacks() if "Triton" in line]


def test_arguments():
    run = subprocess.run([sys.executable, "-m", "benchmarks.gpu_check", "--help"], capture_output=True, text=True, check=True)
    assert all(option in run.stdout for option in ("--backend", "--no-build", "--results", "--budget"))


def test_a_job_that_hangs_or_dies_costs_only_itself(capsys):
    results = gpu_check.run_jobs([sys.executable, "-c", CHILD], time.monotonic() + 30, silence=0.5, first=20)
    assert {name: r["outcome"] for name, r in results.items()} == {
        "good": "equal", "dies": "error", "hangs": "hangs", "last": "equal",
    }  # fmt: skip
    assert "status 3" in results["dies"]["note"]
    assert "hangs: nothing for" in capsys.readouterr().out


def test_it_ends_at_the_deadline():
    start = time.monotonic()
    results = gpu_check.run_jobs([sys.executable, "-c", CHILD.replace('"dies", ', "")], start + 1.5)
    assert time.monotonic() - start < 10
    assert results["hangs"] == {"outcome": "error", "note": "out of time"}


def test_outcomes_of_jobs():
    def refuses():
        raise NotImplementedError("sm_90 has none")

    def differs():
        raise AssertionError

    def breaks():
        raise RuntimeError("CUDA: illegal address")

    lines, made = [], {"refuses": refuses, "differs": differs, "breaks": breaks, "equal": lambda: {"outcome": "equal"}}
    assert jobs.run(made, {"equal"}, lines.append, lambda: True)
    ended = {line["name"]: line["outcome"] for line in lines if line["outcome"] != "started"}
    assert ended == {"refuses": "no kernel", "differs": "wrong", "breaks": "error"}
    assert not jobs.run(made, set(), lines.append, lambda: False)
    assert lines[-1]["outcome"] == "error"


def test_what_is_written(tmp_path):
    measured = {"outcome": "measured", "measured": 0.85, "unit": "x copy bandwidth", "target": 0.8, "holds": True}
    results = {"conformance: a": {"outcome": "equal"}, "conformance: b": {"outcome": "no kernel"}, "speed: quantize": measured}
    written = gpu_check.document("NVIDIA H200", "cuda", FACTS, results)
    path = gpu_check.write(tmp_path / "new", written)
    assert path.name == "nvidia-h200-abc123.json"
    assert gpu_check.write(tmp_path, written | {"backend": "triton"}).name == "nvidia-h200-triton-abc123.json"
    read = json.loads(path.read_text())
    assert read["conformance"] == {"equal": 1, "no kernel": 1}
    assert read["failures"] == {}
    assert read["speed"]["quantize"] == measured
    assert gpu_check.holds(written)
    assert not gpu_check.holds(
        gpu_check.document("a", "cuda", FACTS, results | {"conformance: c": {"outcome": "wrong", "note": "x"}})
    )
    assert not gpu_check.holds(gpu_check.document("a", "cuda", FACTS, results | {"speed: s": measured | {"holds": False}}))
    assert not gpu_check.holds(gpu_check.document("a", "cuda", FACTS, {}))


def test_the_cases_are_the_interpreters():
    table = shared.table()
    assert {f"case {name}" for name in interpreter_cases.CASES} <= set(table)
    mine, all_archs = conformance.jobs("sm_90"), {name for arch in shared.ARCHS for name in conformance.jobs(arch)}
    assert all_archs == set(table)
    assert "case wgrad-bf16-sm_90" in mine
    assert not [name for name in mine if name.endswith("sm_100")]


def test_cases_run_on_the_verbs_of_another_device():
    called = []

    def seen(name, verb, *args):
        called.append(name)
        return verb(*args)

    verbs = device.verbs(interpreter.LAUNCHER)
    with conformance.kernels_on(torch.device("cpu"), {n: partial(seen, n, v) for n, v in verbs.items()}, interpreter.LAUNCHER):
        for name in ("quantize mxfp8 torch.float32 one token", "case rows_plain", "grouped_mm mxfp8 one token sm_100"):
            shared.table()[name]()
    assert set(called) >= {"quantize", "permute", "unpermute", "unpermute_backward", "grouped_mm"}
    assert interpreter.quantize.func is verbs["quantize"].func


def test_a_wrong_kernel_on_another_device_is_seen():
    with (
        conformance.kernels_on(torch.device("cpu"), {"quantize": lambda *args: None}, interpreter.LAUNCHER),
        pytest.raises(AssertionError),
    ):
        shared.table()["quantize mxfp8 torch.float32 ragged"]()


@needs_triton
def test_cases_of_triton_run_on_its_verbs_on_copies():
    """Here in Triton's interpreter, so that the other device is the CPU again; a verb that does nothing is seen."""
    program = """
import torch
from benchmarks.gpu import conformance
from mxmoe.backends import triton
jobs, to = conformance.triton_jobs(), torch.device("cpu")
for name in ("quantize mxfp8 torch.float32 one token", "moe_decode mxfp8", "grouped_mm no groups"):
    with conformance.triton_on(to):
        jobs[name].args[0]()
triton.grouped_mm = lambda *args: None
try:
    with conformance.triton_on(to):
        jobs["grouped_mm no groups"].args[0]()
except AssertionError:
    print("seen")
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.stdout == "seen\n", run.stderr


def test_backend_auto_is_the_one_that_is_checked(monkeypatch):
    monkeypatch.setattr(backends, "fast", backends.fast)
    made = jobs.jobs_of("triton")
    assert backends.candidates("auto", "cuda") == ("triton",)
    assert {name.split(":")[0] for name in made} == {"conformance", "speed"}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", [n for n in speed.jobs("cuda") if not n.startswith(("host copies", "CUDA graph"))])
def test_what_is_timed_is_well_formed(monkeypatch, name, backend):
    monkeypatch.setattr(backends, "fast", lambda device_type: (backend,))
    monkeypatch.setattr(speed, "seconds", lambda call: call() is not None or 1.0)
    monkeypatch.setattr(speed, "copy_speed", lambda: 1.0)
    with FakeTensorMode():
        try:
            made = speed.jobs(backend)[name]()
        except NotImplementedError as error:
            assert f"backend {backend!r} has no" in str(error)  # noqa: PT017
        else:
            assert made["outcome"] == "measured"
            assert made["measured"] > 0


def test_bars_without_a_gpu_say_why():
    bar = next(bar for bar in gpu_bars.BARS if bar.name == "on a GPU: conformance")
    made = measure(bar, Run())
    assert made.measured is not None or (made.holds is None and "gpu_check" in made.stored()["note"])
