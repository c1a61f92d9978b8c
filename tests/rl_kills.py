"""A supervised run of the loop, with Ray and real sandboxes, whose processes are killed at random moments."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from rl.demo.base import make_base
from rl.demo.recipe import BaseRecipe
from rl.weights import Receiver, Store
from training.base import find_base, read_model

MINUTE = BaseRecipe(
    vocab_size=320, dim=32, num_layers=2, num_heads=2, num_experts=4, top_k=2, expert_dim=32, kv_lora_rank=16, num_modules=40,
    num_demonstrations=60, pretrain_steps=2, sft_steps=4, batch_tokens=1024,
)  # fmt: skip
VICTIMS = ("driver", "learner", "sampler", "sandboxd")
MARK = "MXMOE_TEST_RUN"  # in the environment of all that a run starts
QUICK = dict(
    group_size=4, groups_per_step=2, workers=8, slots=8, capacity=400, turns=2, reply_tokens=8, eval_every=0, heldout_tasks=0,
    save_every=3, trackers="", effort_weight=0.05,
)  # fmt: skip


def processes(mark: str) -> dict[int, str]:
    """Those of a run: pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def victim(mark: str, kind: str) -> int | None:
    signs = {
        "driver": "rl train --resume",
        "learner": "ray::LearnerActor",
        "sampler": "ray::SamplerActor",
        "sandboxd": "sandboxd node",
    }
    pids = [pid for pid, command in processes(mark).items() if signs[kind] in command]
    return pids[0] if pids else None


def killed_run(directory: Path, kills: int, steps: int, seed: int = 0, timeout_s: float = 1800.0) -> dict:
    """Runs `steps` steps while `kills` processes are killed. Returns counts of what must not be, and of the kills by kind."""
    base = make_base(directory / "cache", MINUTE)
    run_dir, mark = directory / "run", f"{os.getpid()}-{seed}"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in (QUICK | {"steps": steps}).items()]
    command = [sys.executable, "-m", "rl", "train", "--run-dir", str(run_dir), "--base", str(base), *options]
    command += ["--cache-dir", str(directory / "cache"), "--overwrite"]
    r, done, deadline = random.Random(seed), Counter(), time.monotonic() + timeout_s
    order = [VICTIMS[i % len(VICTIMS)] for i in range(kills)]
    r.shuffle(order)
    with (directory / "log.txt").open("wb") as log:
        child = subprocess.Popen(command, env=os.environ | {MARK: mark}, stdout=log, stderr=log)
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(r.uniform(0.2, 4.0))
            if order and (run_dir / "state.json").exists() and (pid := victim(mark, order[-1])) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    done[order.pop()] += 1
        if child.poll() is None:
            child.terminate()
            child.wait(60)
    return faults(run_dir, base, steps, mark) | {"exit": child.returncode, "not killed": len(order), "kills": dict(done)}


def faults(run_dir: Path, base: Path, steps: int, mark: str) -> dict:
    """What a finished run must have none of."""
    batches = [json.loads(path.read_text()) for path in sorted((run_dir / "batches").glob("*.json"))]
    trained = Counter(name for groups in batches for group in groups for name in group)
    expected = steps * QUICK["groups_per_step"] * QUICK["group_size"]
    model = read_model(find_base(base))
    state = {name: p.data for name, p in model.named_parameters()}
    receiver = Receiver(Store(run_dir / "weights"), state)
    receiver.apply(receiver.fetch())
    time.sleep(2.0)  # what was told to end does
    left = processes(mark)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return {
        "lost": max(0, expected - len(trained)),
        "twice": sum(count > 1 for count in trained.values()),
        "missing steps": max(0, steps - len(batches)) + int(receiver.version != steps),
        "poisoned": sum(not bool(torch.isfinite(t).all()) for t in state.values()),
        "orphans": len(left),
        "parts": len(list(run_dir.rglob("*.part"))),
    }
