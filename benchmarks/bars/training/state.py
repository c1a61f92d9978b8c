"""State: a run that is killed at any moment goes on bitwise as if it had not been."""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.bars.harness import Bar, Run
from benchmarks.machine import ROOT
from training.checkpoint import Checkpoints, read_state
from training.config import PRESETS, configure
from training.train import Trainer

KILLS, STEPS = 50, 1500
WAIT = 0.4  # seconds until a kill, at most, after the first new checkpoint


def values(directory: Path, name: str) -> dict:
    """The micro preset, saving after every step, so that most moments are within a save."""
    places = dict(run_dir=str(directory / name), cache_dir=str(directory / "cache"), corpus="stdlib", corpus_mb=1)
    return places | dict(steps=STEPS, save_every=1, eval_every=10**6, recipe="mxfp8", trackers="")


def start(*arguments: str) -> subprocess.Popen:
    """A Python program on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def train(directory: Path, *options: str) -> subprocess.Popen:
    given = [text for key, value in values(directory, "killed").items() for text in (f"--{key.replace('_', '-')}", str(value))]
    return start("-m", "training", "run", "--preset", "micro", *given, *options)


def finished(process: subprocess.Popen) -> None:
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"training ended with status {process.returncode}:\n{output[-2000:]}")


def digest(state: dict) -> str:
    """Of every tensor and value but times and the configuration."""
    sha = hashlib.sha256()

    def add(value, path: str) -> None:
        if isinstance(value, dict):
            for name in sorted(value.keys() - {"seconds", "config"}):
                add(value[name], f"{path}/{name}")
        elif isinstance(value, torch.Tensor):
            sha.update(f"{path} {value.dtype} {tuple(value.shape)}".encode())
            sha.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            sha.update(f"{path} {json.dumps(value)}".encode())

    add(state, "")
    return sha.hexdigest()


def uninterrupted(directory: str) -> None:
    """Writes the digest of the state after every step."""
    trainer = Trainer.start(configure(**PRESETS["micro"] | values(Path(directory), "whole")))
    digests = {}
    for _ in range(STEPS):
        trainer.train_step()
        digests[trainer.step] = digest(trainer.state_dict())
    Path(directory, "digests.json").write_text(json.dumps(digests))


def kill_failures(run: Run) -> float:
    """Kill -9 at random moments of a run that saves after every step: kills after which the newest intact checkpoint is not, bit
    for bit, the uninterrupted run's of that step; and the end, if it differs."""
    rng, failures, within_save, kills = random.Random(0), 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        finished(start("-c", f"from benchmarks.bars.training.state import uninterrupted as u; u({name!r})"))
        expected = json.loads((directory / "digests.json").read_text())
        checkpoints = Checkpoints(directory / "killed" / "checkpoints")

        def is_wrong() -> bool:
            newest = checkpoints.newest()
            return digest(read_state(newest)) != expected[str(int(newest.name.removeprefix("step-")))]

        for _ in run.steps(range(run.count(KILLS, least=2))):
            before = checkpoints.paths()[:1]
            process = train(directory, "--resume" if before else "--overwrite")
            while checkpoints.paths()[:1] == before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.random() * WAIT)
            if process.poll() is not None:
                finished(process)
                break
            process.kill()
            process.communicate()
            kills += 1
            within_save += any(checkpoints.directory.glob("step-*.tmp"))
            failures += is_wrong()
        finished(train(directory, "--resume"))
        failures += is_wrong() or checkpoints.newest().name != f"step-{STEPS:08d}"
    run.note(f"{kills} kills, {within_save} within a save")
    return float(failures)


BARS = [Bar("resume: failures after 50 kills -9 at random moments", "<=", 0, "runs", kill_failures, long=True)]
