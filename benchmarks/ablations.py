"""Experiments of an hour or two: what low precision costs in held-out loss, how the loss falls with compute, and a longer context.

    make ablations            # or python -m benchmarks.ablations [--seeds 3] [--run-dir runs/ablations]

All runs are the preset `tiny` on the standard library, one row of 512 tokens a step, on one thread: what they end with does not
depend on how fast they were. Runs of one seed begin with the same weights and read the same rows in the same order. The same
command goes on after an interruption, and several processes that run it share the work. Numbers are in
benchmarks/results/ablations.json, the picture of the loss against compute is docs/scaling.png.
"""

import argparse
import fcntl
import json
import math
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import machine
from training.checkpoint import Checkpoints
from training.config import configure
from training.data import IGNORE, Samples, batch
from training.model import Model, parameter_roles
from training.phases import PHASES
from training.train import Trainer

RESULTS = machine.ROOT / "benchmarks" / "results" / "ablations.json"
PICTURE = machine.ROOT / "docs" / "scaling.png"
COMMAND = "make ablations"
SETTINGS = dict(corpus="stdlib", batch_size=1, eval_windows=128, save_every=250, keep=1, trackers="")  # else the preset `tiny`
PAIRED = dict(lr=2.5e-4, bias_speed=1.25e-3, warmup_steps=80)  # a quarter of the preset's tokens a step: a quarter of its rates
RECIPES = ("bf16", "mxfp8", "nvfp4")
BUDGETS = (125, 250, 500, 1000)  # steps
STRETCH = 4  # of the context


@dataclass(frozen=True)
class Experiment:
    """A run: its name, the fields of Config that it changes, and the run whose weights it begins with."""

    name: str
    values: dict
    base: str = ""


def plan(seeds: int) -> list[Experiment]:
    """budget-N: the loss after N steps; long: four times the context, from the longest of them; pair-RECIPE-SEED."""
    base = f"budget-{BUDGETS[-1]}"
    runs = [Experiment(f"budget-{steps}", dict(recipe="mxfp8", seed=0, steps=steps)) for steps in reversed(BUDGETS)]
    runs += [Experiment("long", PHASES["long"] | dict(recipe="mxfp8", seed=0, seq_len=STRETCH * 512), base)]
    for seed in range(seeds):
        values = PAIRED | dict(seed=seed, steps=BUDGETS[-1])
        runs += [Experiment(f"pair-{recipe}-{seed}", values | dict(recipe=recipe)) for recipe in RECIPES]
    return runs


def work(directory: Path, experiments: list[Experiment], settings: dict) -> None:
    """Makes the runs that are neither finished nor another process's, until none is left that could begin."""
    is_progress = True
    while is_progress:
        is_progress = False
        for experiment in experiments:
            run_dir = directory / experiment.name
            is_ready = not experiment.base or (directory / experiment.base / "record.json").exists()
            with _claimed(run_dir) as is_ours:
                if is_ours and is_ready and not (run_dir / "record.json").exists():
                    _run(directory, experiment, settings)
                    is_progress = True


@contextmanager
def _claimed(run_dir: Path) -> Iterator[bool]:
    """Whether the run is this process's for now; the claim ends with the process."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "claim").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _run(directory: Path, experiment: Experiment, settings: dict) -> None:
    run_dir = directory / experiment.name
    values = settings | experiment.values
    values |= dict(
        run_dir=str(run_dir), eval_every=values["steps"], init=str(directory / experiment.base) if experiment.base else ""
    )
    print(f"{experiment.name}: begins", flush=True)
    has_state = Checkpoints(run_dir / "checkpoints").paths()
    trainer = Trainer.resume(run_dir) if has_state else Trainer.start(configure(**values))
    if trainer.run(COMMAND):
        raise SystemExit(f"{experiment.name} was stopped; {COMMAND} goes on")
    result = json.loads((run_dir / "result.json").read_text())
    record = dict(name=experiment.name, base=experiment.base, commit=machine.commit(), seq_len=trainer.config.seq_len)
    record |= {name: values[name] for name in ("recipe", "seed", "steps")} | {"tokens": result["tokens"]}
    record |= {"heldout_loss": result["heldout_loss"], "flop": 6 * active_parameters(trainer.model) * result["tokens"]}
    if experiment.base:
        window = trainer.config.seq_len // STRETCH
        record |= dict(zip(("loss_within", "loss_beyond"), losses_by_position(trainer.model, trainer.tokens, window), strict=True))
        base = Trainer.resume(directory / experiment.base)
        keys = ("unextended_within", "unextended_beyond")
        record |= dict(zip(keys, losses_by_position(base.model, base.tokens, window), strict=True))
    partial = run_dir / "record.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.rename(run_dir / "record.json")
    if experiment.name != f"budget-{BUDGETS[-1]}":  # which the longer context begins with
        shutil.rmtree(run_dir / "checkpoints")
    print(f"{experiment.name}: {record}", flush=True)


def active_parameters(model: Model) -> int:
    """That a token is multiplied with: of the experts top_k of all, without the embedding."""
    share = {"expert": model.config.top_k / model.config.num_experts, "embedding": 0.0}
    roles = parameter_roles(model)
    return round(sum(p.numel() * share.get(roles[name], 1.0) for name, p in model.named_parameters()))


@torch.no_grad()
def losses_by_position(model: Model, tokens, window: int) -> tuple[float, float]:
    """Mean held-out loss at positions within and beyond `window`, of documents that reach beyond, in rows of STRETCH windows."""
    samples = Samples(tokens, "heldout", STRETCH * window)
    losses: tuple[list, list] = ([], [])
    for row in samples.spread(samples.num_rows[0]):
        ids, targets, positions = batch([row])
        values = F.cross_entropy(model(ids, positions)[0][0].float(), targets[0].clamp(min=0), reduction="none")
        begins = (positions[0] == 0).nonzero().flatten().tolist()
        for start, end in zip(begins, [*begins[1:], len(values)], strict=True):
            if end - start <= window or targets[0, start] == IGNORE:
                continue
            losses[0].append(values[start : start + window])
            losses[1].append(values[start + window : end][targets[0, start + window : end] != IGNORE])
    within, beyond = (float(torch.cat(parts).mean()) for parts in losses)
    return within, beyond


def collect(directory: Path, settings: dict) -> dict:
    """All finished runs' records, with what is needed to make them again."""
    records = [json.loads(path.read_text()) for path in sorted(directory.glob("*/record.json"))]
    return {"command": COMMAND, "machine": machine.describe(), "settings": settings, "paired": PAIRED, "runs": records}


def excess(results: dict, recipe: str) -> tuple[float, float, int]:
    """(mean, standard error, seeds) of the held-out loss above bf16's of the same seed, %."""
    losses = {(run["recipe"], run["seed"]): run["heldout_loss"] for run in results["runs"] if run["name"].startswith("pair-")}
    seeds = [seed for other, seed in losses if other == recipe and ("bf16", seed) in losses]
    values = [100 * (losses[recipe, seed] / losses["bf16", seed] - 1) for seed in seeds]
    if len(values) < 2:
        raise ValueError(f"at least two pairs of {recipe} and bf16 runs are needed, got {len(values)}")
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)), len(values)


def budgets(results: dict) -> list[dict]:
    """The runs that differ in their steps alone, by compute."""
    return sorted((run for run in results["runs"] if run["name"].startswith("budget-")), key=lambda run: run["flop"])


def line(runs: list[dict]) -> tuple[float, float, float]:
    """(slope per factor of ten, value at 1 FLOP, R squared) of the held-out loss against log10 of the compute."""
    x, y = np.log10([run["flop"] for run in runs]), np.array([run["heldout_loss"] for run in runs])
    slope, intercept = np.polyfit(x, y, 1)
    left = y - (slope * x + intercept)
    return float(slope), float(intercept), float(1 - (left @ left) / ((y - y.mean()) @ (y - y.mean())))


def draw(runs: list[dict], path: Path) -> None:
    from training.report import COLOURS, FAINT, STYLE, plt

    slope, intercept, fit = line(runs)
    x, y = [run["flop"] for run in runs], [run["heldout_loss"] for run in runs]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
        axis.plot(x, [slope * math.log10(v) + intercept for v in x], color=FAINT, linewidth=2.5)
        axis.plot(x, y, "o", color=COLOURS["mxfp8"], markersize=8)
        for run in runs:
            axis.annotate(f"{run['steps']} steps", (run["flop"], run["heldout_loss"]), xytext=(6, 6), textcoords="offset points")
        axis.set_xscale("log")
        axis.set_xlabel("FLOP = 6 x active parameters x tokens")
        axis.set_ylabel("held-out loss, nats per token")
        axis.set_title(f"mxfp8, preset tiny: {slope:.2f} per factor of ten, R² = {fit:.4f}", loc="left", fontweight="bold")
        axis.grid(axis="y", color=FAINT, linewidth=0.7)
        figure.savefig(path, dpi=140)
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablations", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/ablations"), help="default: %(default)s")
    parser.add_argument(
        "--collect", action="store_true", help="only write the numbers and the picture of the runs that are finished"
    )
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not arguments.collect:
        work(arguments.run_dir, plan(arguments.seeds), SETTINGS)
    results = collect(arguments.run_dir, SETTINGS)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(results['runs'])} runs in {RESULTS}")
    if len(budgets(results)) == len(BUDGETS):
        draw(budgets(results), PICTURE)
        print(f"R squared {line(budgets(results))[2]:.4f}: {PICTURE}")
    for recipe in RECIPES[1:]:
        try:
            mean, error, seeds = excess(results, recipe)
            print(f"{recipe}: {mean:+.3f} % above bf16, standard error {error:.3f} %, {seeds} seeds")
        except ValueError as reason:  # with --collect, before enough runs are finished
            print(reason)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
