"""`python -m rl train`: the asynchronous loop, from a base and tasks to weights that do better; `python -m rl demo`: on tiny ones.

With samplers and learner as Ray actors the run is a process of its own, which is started again where it dies: a run goes on from
its directory, whatever was killed.
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rl.config import CHANGEABLE, RunConfig, add_arguments
from training.rundir import StopRequest

CONFIG, STATE = "config.json", "state.json"
CHILD = "MXMOE_RL_RUN"  # set in the process that runs
MAX_RESTARTS = 50


def main(argv: Sequence[str]) -> int:
    """The command `train`."""
    return command("train", "the asynchronous loop of reinforcement learning", argv, {})


def command(name: str, about: str, argv: Sequence[str], defaults: dict) -> int:
    parser = argparse.ArgumentParser(f"python -m rl {name}", description=about)
    parser.add_argument("--resume", action="store_true", help="go on with the run in the directory")
    parser.add_argument("--overwrite", action="store_true", help="remove the run in the directory first")
    parser.add_argument("--dry-run", action="store_true", help="print what would run where")
    add_arguments(parser, defaults)
    options = vars(parser.parse_args(list(argv)))
    resume, overwrite, dry_run = (options.pop(key) for key in ("resume", "overwrite", "dry_run"))
    try:
        config = configured(defaults, options, resume)
        if dry_run:
            print(plan(config))
            return 0
        if os.environ.get(CHILD):  # its parent has prepared all; the address is of this start only
            return run(config)
        prepare(config, resume, overwrite)
        return run(config) if config.place == "inline" else supervise(config)
    except (ValueError, OSError, RuntimeError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def configured(defaults: dict, options: dict, resume: bool) -> RunConfig:
    """The run's numbers; of one that goes on, as saved, with what may change. Raises ValueError for what may not."""
    config = RunConfig(**defaults | options)
    if not resume:
        return config
    path = Path(config.run_dir) / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"nothing to resume: no {CONFIG} in {config.run_dir}")
    saved = RunConfig(**json.loads(path.read_text()) | {"run_dir": config.run_dir})
    for name, value in options.items():
        if name not in (*CHANGEABLE, "run_dir") and value != getattr(saved, name):
            raise ValueError(f"a resumed run keeps its {name} ({getattr(saved, name)!r}), got {value!r}")
    return replace(saved, **{name: value for name, value in options.items() if name in CHANGEABLE})


def prepare(config: RunConfig, resume: bool, overwrite: bool) -> None:
    """Makes the directory and writes the configuration, so that the run can be gone on with from its first moment.

    FileExistsError where it holds a run that got anywhere, or one of `training`, and neither `resume` nor `overwrite` is given.
    """
    directory = Path(config.run_dir)
    if not resume:
        if any((directory / name).exists() for name in (STATE, "checkpoints")) and not overwrite:
            raise FileExistsError(f"{directory} holds a run: continue it with --resume or replace it with --overwrite")
        if overwrite or (directory / CONFIG).exists():  # what a start that failed has left; without it, nothing here is of a run
            for name in ("checkpoints", "weights", "rollouts", "batches", "evaluations", "tensorboard"):
                shutil.rmtree(directory / name, ignore_errors=True)
            for name in (STATE, "metrics.jsonl", "loads.jsonl", CONFIG):
                (directory / name).unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(asdict(config), indent=1) + "\n")


def plan(config: RunConfig) -> str:
    """What would run where, in words."""
    c = config
    where = "actors of Ray" + (f" at {c.address}" if c.address else " on this machine") if c.place == "ray" else "this process"
    lines = [
        f"run directory   {c.run_dir}",
        f"base            {c.base or 'the tiny base, made and kept in ' + c.cache_dir}",
        f"tasks           {c.tasks}, {c.steps} steps of {c.groups_per_step} prompts, {c.group_size} samples each",
        f"learner         1 in {where}: {c.threads} thread(s), {c.learner_gpus:g} GPU(s), AdamW at {c.lr:g}",
        f"samplers        {c.samplers} in {where}: {c.threads} thread(s), {c.sampler_gpus:g} GPU(s), "
        f"{c.slots} slots of {c.capacity} tokens",
        f"workers         {c.workers} in this process, sandboxes by {c.backend}",
        f"weights         {Path(c.run_dir) / 'weights'}, at most {c.max_staleness} versions old when trained",
        f"evaluations     {c.heldout_tasks} held-out tasks x {c.heldout_samples} before and after, "
        + (f"{c.eval_tasks} every {c.eval_every} steps" if c.eval_every else "none in between"),
    ]
    return "\n".join(lines)


def supervise(config: RunConfig) -> int:
    """Owns Ray's cluster and the process of the run: starts that again, to go on, where a signal ended it."""
    from rl import actors

    actors.connect(config.address)
    import ray

    address = config.address or ray.get_runtime_context().gcs_address
    arguments = [sys.executable, "-m", "rl", "train", "--resume", "--run-dir", config.run_dir, "--address", address]
    environment = os.environ | {CHILD: "1"}
    with StopRequest() as stop:
        for _ in range(MAX_RESTARTS):
            # Ctrl-C reaches this process alone, which passes it on once; the child ends with this process, however that ends.
            child = subprocess.Popen(arguments, env=environment, process_group=0, preexec_fn=end_with_parent)
            status = waited(child, stop)
            if status >= 0 or stop.signal:
                return status if status >= 0 else 128 - status
            print(f"the run was ended by {signal.Signals(-status).name}; it goes on", file=sys.stderr, flush=True)
    print(f"the run was ended {MAX_RESTARTS} times; continue it with --resume", file=sys.stderr)
    return 1


def end_with_parent() -> None:
    """Linux tells this process by SIGTERM that its parent is gone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def waited(child: subprocess.Popen, stop: StopRequest) -> int:
    """The child's exit status; a request to stop is passed on."""
    told = False
    while child.poll() is None:
        if stop.signal and not told:
            told = True
            child.send_signal(stop.signal)
        time.sleep(0.05)
    return child.returncode


def run(config: RunConfig) -> int:
    """The run itself, in this process. Returns its exit status: 0 done, 1 stopped before."""
    from rl import actors
    from rl.dashboard import Dashboard, rates
    from rl.loop import Loop
    from rl.plots import conclude
    from rl.setting import setting
    from training.metrics import Metrics

    if config.place == "ray":
        actors.connect(config.address)  # before StopRequest: Ray has a handler of SIGTERM, too
    run_dir = Path(config.run_dir)
    with Dashboard() as dashboard, StopRequest() as stop:
        dashboard.title = config.run_dir
        base, prompts, heldout, dialect, tools = setting(config, dashboard.on_progress)
        dashboard.say("starting sampler and learner")
        with Loop(config, base, prompts, heldout, dialect, tools, on_step=dashboard.on_step) as loop:
            metrics = Metrics(run_dir, loop.reconciler.step, config.trackers, asdict(config))

            def on_step(values: dict) -> None:
                dashboard.on_step(values)
                metrics.log(**values)

            loop.on_step, dashboard.loop = on_step, loop
            final = [config.heldout_samples] if config.heldout_tasks else []
            for samples in final if not (run_dir / "evaluations" / "before.json").exists() and loop.reconciler.step == 0 else []:
                report = loop.evaluate("before", heldout, samples, on_tick=dashboard.on_tick)
                dashboard.say("before: " + ", ".join(rates(report)) + f"; {100 * report['parsed']:.1f} % of calls parse")
            if not loop.run(stopped=lambda: stop.signal is not None, on_tick=dashboard.on_tick):
                metrics.close()
                dashboard.say(f"stopped at step {loop.reconciler.step}; continue with --resume")
                return 1
            for samples in final:
                loop.evaluate("after", heldout, samples, on_tick=dashboard.on_tick)
            metrics.close()
    conclude(run_dir)
    return 0
