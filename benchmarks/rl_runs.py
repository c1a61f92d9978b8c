"""Whole runs of reinforcement learning, each some minutes: the demo in three seeds, and what changes when one thing does.

    make rl-ablations         # or python -m benchmarks.rl_runs [--seeds 3] [--only demo] [--run-dir runs/rl-runs]

Every run is `python -m rl train` on the demo's base and tasks, in real sandboxes. The ablations are half as long as the demo. The
same command goes on after an interruption, on another machine too: what benchmarks/results/rl-runs.json holds is not run again, so
remove it to begin anew. The picture is docs/rl-ablations.png.
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks import machine
from rl.demo.base import FIRST_SEED, encoded, load_base, make_base, tasks
from rl.demo.expert import demonstration
from rl.demo.recipe import BaseRecipe, RLRecipe
from rl.harness.dialect import TerseDialect
from rl.heldout import gain
from training.metrics import read_metrics

RESULTS = machine.ROOT / "benchmarks" / "results" / "rl-runs.json"
PICTURE = machine.ROOT / "docs" / "rl-ablations.png"
COMMAND = "make rl-ablations"
HALF = dict(steps=20, heldout_tasks=100, eval_every=0)
BUDGETS = (25, 100, 400)  # steps of pretraining
VARIANTS = {
    "plain": {},
    "standardized": dict(standardize=True),
    "kl-k1": dict(kl_weight=0.02, kl_estimator="k1"),
    "kl-k3": dict(kl_weight=0.02, kl_estimator="k3"),
    "nvfp4-replay": dict(recipe="nvfp4"),
    "nvfp4-no-replay": dict(recipe="nvfp4", replay=False),
    "effort-0.1": dict(effort_weight=0.1),
    "effort-0.3": dict(effort_weight=0.3),
}


@dataclass(frozen=True)
class Experiment:
    """A run: its name, what of RunConfig and of the base's recipe it changes."""

    name: str
    seed: int
    values: dict = field(default_factory=dict)
    pretrain_steps: int = BaseRecipe.pretrain_steps

    @property
    def title(self) -> str:
        return f"{self.name}-{self.seed}"

    @property
    def recipe(self) -> BaseRecipe:
        return replace(BaseRecipe(), pretrain_steps=self.pretrain_steps)

    @property
    def described(self) -> dict:
        """As the record of a run has it."""
        values = {name: value for name, value in self.values.items() if name != "run_dir"}
        return {"name": self.name, "seed": self.seed, "values": values, "pretrain_steps": self.pretrain_steps}


def plan(seeds: int) -> list[Experiment]:
    """The demo first, then the budgets of pretraining, then the variants."""
    every = range(seeds)
    found = [Experiment("demo", seed, RLRecipe().run_config) for seed in every]
    half = RLRecipe().run_config | HALF
    found += [Experiment(f"budget-{steps}", seed, half, steps) for seed in every for steps in BUDGETS]
    found += [Experiment(name, seed, half | values) for seed in every for name, values in VARIANTS.items()]
    return found


def missing(directory: Path, experiments: Sequence[Experiment]) -> list[Experiment]:
    """Those without a record."""
    records = collect(directory)["runs"]
    return [e for e in experiments if not any(e.described.items() <= record.items() for record in records)]


def work(directory: Path, experiments: Sequence[Experiment]) -> None:
    """Makes the runs, one after the other."""
    for experiment in experiments:
        run_dir = directory / experiment.title
        print(f"{experiment.title}: begins", flush=True)
        base = make_base(directory / "bases", experiment.recipe, on_progress=progress)
        command = [sys.executable, "-m", "rl", "train", "--run-dir", str(run_dir)]
        if (run_dir / "state.json").exists():
            command += ["--resume"]
        else:
            values = experiment.described["values"]
            values |= {"seed": experiment.seed, "base": base, "cache_dir": directory / "cache"}
            command += [option_of(name, value) for name, value in values.items()]
        subprocess.run(command, check=True)
        write_record(run_dir, experiment, base)


def option_of(name: str, value) -> str:
    option = name.replace("_", "-")
    return f"--{option}={value}" if not isinstance(value, bool) else f"--{option}" if value else f"--no-{option}"


def progress(what: str, done: int, of: int, loss: float) -> None:
    if done % 50 == 0 or done == of:
        print(f"base: {what}, step {done} of {of}, loss {loss:.3f}", flush=True)


def write_record(run_dir: Path, experiment: Experiment, base: Path) -> None:
    before, after = (json.loads((run_dir / "evaluations" / f"{name}.json").read_text()) for name in ("before", "after"))
    steps = [record for record in read_metrics(run_dir / "metrics.jsonl") if "reward" in record]
    gains = gain(before, after)
    record = experiment.described | {
        "commit": machine.commit(),
        "machine": machine.describe(),
        "base_seconds": json.loads((base / "base.json").read_text())["seconds"],
        "loop_seconds": math.fsum(step["samples"] / step["samples_per_s"] for step in steps),
        "samples": sum(step["samples"] for step in steps),
        "staleness": max(step["staleness"] for step in steps),
        "replies": [steps[0]["replies"], steps[-1]["replies"]],
        "mismatch": statistics.fmean(step["mismatch"] for step in steps),
        "heldout_loss": heldout_loss(base),
        "gains": {name: list(values) for name, values in gains.items()},
    }
    for name, evaluation in (("before", before), ("after", after)):
        record[name] = {key: value for key, value in evaluation.items() if key != "scores"}
    part = run_dir / "record.part"
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.rename(run_dir / "record.json")


@torch.no_grad()
def heldout_loss(base: Path, count: int = 200) -> float:
    """Nats per token that the base gives replies of demonstrations it has not seen."""
    model, vocabulary, recipe = load_base(base)
    dialect, r = TerseDialect(vocabulary), random.Random("heldout")
    total = tokens = 0.0
    for task in tasks(recipe, 100 * FIRST_SEED, count, "heldout"):
        ids, learned = encoded(dialect, demonstration(task, r, recipe.demonstrations))
        logits, _ = model(torch.tensor([ids[: recipe.max_length]]))
        losses = -logits[0, :-1].float().log_softmax(1).gather(1, torch.tensor(ids[1 : recipe.max_length])[:, None])[:, 0]
        mask = torch.tensor(learned[1 : recipe.max_length])
        total, tokens = total + float(losses[mask].sum()), tokens + float(mask.sum())
    return total / tokens


def collect(directory: Path) -> dict:
    """All finished runs' records: those of the results, and those in the directory, which replace older ones."""
    stored = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("*/record.json"))]
    return {"command": COMMAND, "runs": list({(run["name"], run["seed"]): run for run in stored + found}.values())}


def by_name(results: dict) -> dict[str, list[dict]]:
    found = defaultdict(list)
    for run in results["runs"]:
        found[run["name"]].append(run)
    return found


def draw(results: dict, path: Path) -> None:
    """What each variant gained on held-out tasks: mean and standard error over seeds."""
    from training.report import COLOURS, FAINT, STYLE, plt

    runs = by_name(results)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
        for axis, key in zip(axes, ("mean", "best"), strict=True):
            for y, found in enumerate(runs.values()):
                values = [100 * run["gains"][key][0] for run in found]
                error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
                axis.errorbar(statistics.fmean(values), y, xerr=error, fmt="o", color=COLOURS["mxfp8"], capsize=3)
            axis.set_yticks(range(len(runs)), runs)
            axis.axvline(0, color=FAINT)
            axis.set_xlabel(f"gain in the {key} of a held-out task, points")
        figure.savefig(path, dpi=140)
        plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name contains TEXT")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/rl-runs"), help="default: %(default)s")
    parser.add_argument("--collect", action="store_true", help="only write the numbers of the runs that are finished")
    arguments = parser.parse_args(argv)
    if not arguments.collect:
        work(arguments.run_dir, missing(arguments.run_dir, [e for e in plan(arguments.seeds) if arguments.only in e.title]))
    results = collect(arguments.run_dir)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(results['runs'])} runs in {RESULTS}")
    if any(run["name"] != "demo" for run in results["runs"]):
        draw(results, PICTURE)
    for name, runs in by_name(results).items():
        told = (f"{key} {100 * statistics.fmean(run['gains'][key][0] for run in runs):+.1f} points" for key in ("mean", "best"))
        print(f"{name}: {', '.join(told)}, {len(runs)} seeds")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
