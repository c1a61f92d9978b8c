"""Whole programs: the tiny model beside transformers, the demo, and the test suite from a fresh clone."""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

from benchmarks.bars.harness import Bar, Run
from benchmarks.machine import ROOT

DEMO_SECONDS = 360
SUITE_SECONDS = 480


def logits_difference(run: Run) -> float:
    """Largest |difference| of FP32 logits from transformers', of the tiny preset's sizes with the same random weights."""
    from tests.test_model import TINY_HF, hf_model
    from training.hf import config_from_hf, state_from_hf
    from training.model import Model

    theirs = hf_model(**TINY_HF)
    ours = Model(config_from_hf(theirs.config, recipe="fp32"))
    ours.load_state_dict(state_from_hf(theirs.state_dict()))
    worst = 0.0
    with torch.no_grad():
        for seed in run.steps(range(run.count(8))):
            ids = torch.randint(0, TINY_HF["vocab_size"], (2, 128), generator=torch.Generator().manual_seed(seed))
            expected = theirs(ids).logits
            assert expected.std() > 0.1, expected.std()  # a model whose logits are all near zero would prove nothing
            worst = max(worst, float((ours(ids)[0] - expected).abs().max()))
    return worst


@cache
def demo(quick: bool) -> tuple[float, dict[str, float]]:
    """(seconds, held-out loss by recipe) of `python -m training demo` with empty run and cache directories."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "training", "demo", "--run-dir", f"{directory}/run", "--cache-dir", f"{directory}/cache"]
        command += ["--preset", "micro"] if quick else []
        start = time.monotonic()
        _call(command, ROOT)
        seconds = time.monotonic() - start
        results = json.loads(Path(directory, "run", "results.json").read_text())
    return seconds, {result["recipe"]: result["heldout_loss"] for result in results}


def demo_seconds(run: Run) -> float:
    return demo(run.quick)[0]


def loss_difference(recipe: str):
    def measure(run: Run) -> float:
        """|held-out loss / BF16's - 1| in per cent, same seed."""
        losses = demo(run.quick)[1]
        return 100 * abs(losses[recipe] / losses["bf16"] - 1)

    return measure


def suite_seconds(run: Run) -> float:
    """Seconds of `make test` in a fresh clone of HEAD, without a virtual environment, so that it is installed as well."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(["git", "clone", "--quiet", "--no-local", str(ROOT), f"{directory}/clone"], check=True)
        environment = {
            k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHON", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL")
        }
        if virtual := os.environ.get("VIRTUAL_ENV"):
            paths = environment["PATH"].split(os.pathsep)
            environment["PATH"] = os.pathsep.join(p for p in paths if not p.startswith(virtual))
        start = time.monotonic()
        _call(["make", "test"], Path(directory, "clone"), environment)
        return time.monotonic() - start


def _call(command: list[str], directory: Path, environment: dict[str, str] | None = None):
    """Runs a program; RuntimeError with the end of its output where it fails."""
    done = subprocess.run(command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-4000:]}")


PARITY = [Bar("tiny model: FP32 logits = transformers", "<=", 1e-5, "largest difference", logits_difference)]
DEMO = [
    Bar("demo: time", "<", DEMO_SECONDS, "s", demo_seconds, kind="time"),
    Bar("demo: held-out loss of mxfp8 beside bf16", "<=", 1.0, "%", loss_difference("mxfp8")),
    Bar("demo: held-out loss of nvfp4 beside bf16", "<=", 2.0, "%", loss_difference("nvfp4")),
]
SUITE = [Bar("make test from a fresh clone", "<", SUITE_SECONDS, "s", suite_seconds, kind="time", long=True)]
