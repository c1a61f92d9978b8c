"""The two programs: one recipe, and several recipes from the same weights on the same data, side by side."""

import json
import shlex
import shutil
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

from training.base import model_config
from training.checkpoint import Checkpoints, read_state, read_values
from training.config import Config, configure, flat
from training.data import Samples, Stream, open_tokens
from training.metrics import read_metrics, write_metrics
from training.model import Model
from training.report import plot_losses, table, time_moe
from training.rundir import clear_run_dir, prepare_run_dir
from training.train import Trainer

RECIPES = ("bf16", "mxfp8", "nvfp4")
DEFAULTS = dict(run_dir="runs/demo", corpus="stdlib", steps=100, warmup_steps=10, eval_every=20, eval_windows=24, save_every=50)
CALIBRATION_STEPS = 4  # the fastest counts


def resume_command(program: str, run_dir: Path) -> str:
    """What to type to go on, with this very interpreter."""
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    return shlex.join([python, "-m", "training", program, "--resume", "--run-dir", str(run_dir)])


def run(config: Config, changes: dict, *, resume: bool, overwrite: bool) -> int:
    """One recipe, from the start or resumed with `changes`; prints its table and draws its picture.

    Returns the process's exit status.
    """
    trainer = Trainer.resume(config.run_dir, changes) if resume else Trainer.start(config, overwrite=overwrite)
    status = trainer.run(resume_command("run", trainer.run_dir))
    draw([trainer.run_dir], trainer.run_dir)
    if status == 0:
        compare([trainer.run_dir], trainer.run_dir)
    return status


def demo(config: Config, recipes: list[str], minutes: float | None, *, resume: bool, overwrite: bool) -> int:
    """Trains every recipe in `run_dir/<recipe>` and compares them in `run_dir`. Returns the process's exit status."""
    root = Path(config.run_dir)
    if resume:
        config, recipes = load_plan(root)
    else:
        config = start_plan(root, config, recipes, minutes, overwrite)
    print(f"{', '.join(recipes)}: {config.steps} steps of {config.tokens_per_step} tokens each; results go to {root}/")

    run_dirs = [root / recipe for recipe in recipes]
    for recipe, run_dir in zip(recipes, run_dirs, strict=True):
        if (run_dir / "result.json").exists():
            continue
        if Checkpoints(run_dir / "checkpoints").paths():
            trainer = Trainer.resume(run_dir)
        else:
            trainer = Trainer.start(replace(config, recipe=recipe, run_dir=str(run_dir)))
        status = trainer.run(resume_command("demo", root))
        draw(run_dirs, root)
        if status:
            return status
    compare(run_dirs, root)
    return 0


def start_plan(root: Path, config: Config, recipes: list[str], minutes: float | None, overwrite: bool) -> Config:
    """Writes what the demo will do to `demo.json`, so that it can be resumed; returns the configuration of all
    recipes."""
    prepare_run_dir(root)
    if (root / "demo.json").exists() and not overwrite:
        raise FileExistsError(f"{root} holds a demo: continue it with --resume or replace it with --overwrite")
    if minutes is not None:
        if not 0 < minutes < inf:
            raise ValueError(f"minutes must be greater than 0 and finite, got {minutes}")
        config = replace(config, steps=steps_for(config, recipes, minutes))
    Trainer(replace(config, recipe=recipes[0]))  # a mistake in the configuration must not cost the old demo
    for recipe in recipes:
        clear_run_dir(root / recipe)
    (root / "demo.json").write_text(json.dumps({"recipes": recipes, "config": flat(config)}, indent=1) + "\n")
    return config


def load_plan(root: Path) -> tuple[Config, list[str]]:
    """What `start_plan` wrote; the directory may have moved since."""
    if not (root / "demo.json").exists():
        raise FileNotFoundError(f"nothing to resume: no demo.json in {root}")
    plan = json.loads((root / "demo.json").read_text())
    return configure(**plan["config"] | {"run_dir": str(root)}), plan["recipes"]


def steps_for(config: Config, recipes: list[str], minutes: float) -> int:
    """How many steps fit in the minutes if all recipes make as many, on this machine as fast as it is now."""
    seconds = 0.0
    for recipe in recipes:
        trainer = Trainer(replace(config, recipe=recipe))
        seconds += config.tokens_per_step / max(trainer.train_step()["tokens_per_s"] for _ in range(CALIBRATION_STEPS))
    heldout_tokens = config.eval_windows * config.seq_len / config.eval_every  # per step; a forward is a third of a step
    return max(1, int(minutes * 60 / (seconds * (1 + heldout_tokens / (3 * config.tokens_per_step)))))


def draw(run_dirs: list[Path], out: Path) -> None:
    """Picture of what the runs have recorded so far; several runs' records are also joined in one file."""
    records = [record for run_dir in run_dirs for record in read_metrics(run_dir / "metrics.jsonl")]
    if out not in run_dirs:
        write_metrics(out / "metrics.jsonl", records)
    config = json.loads((run_dirs[0] / "config.json").read_text())
    title = f"{config['num_experts']} experts, top {config['top_k']}, width {config['dim']}: loss on Python source"
    plot_losses(records, out / "loss.png", title)


def compare(run_dirs: list[Path], out: Path) -> None:
    """Times the MoE layers of the finished runs' models, prints the table and writes it to `out`."""
    models = {}
    for run_dir in run_dirs:
        path = Checkpoints(run_dir / "checkpoints").newest()
        saved = read_values(path)
        config = configure(**saved["config"])
        models[config.recipe] = Model(replace(model_config(saved["model_config"]), recipe=config.recipe))
        models[config.recipe].load_state_dict(
            read_state(path, {"model": models[config.recipe].state_dict()}, only="model")["model"]
        )
    tokens = open_tokens(Path(config.cache_dir) / saved["tokens_key"])
    ids = Stream(Samples(tokens, "train", config.seq_len, config.seed)).next_batch(config.batch_size).ids
    times = time_moe(models, ids)
    results = [json.loads((run_dir / "result.json").read_text()) for run_dir in run_dirs]
    results = [result | times[result["recipe"]] for result in results]
    text = table(results)
    print(f"\n{text}\n")
    (out / "table.txt").write_text(text + "\n")
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"picture: {out / 'loss.png'}    curves: tensorboard --logdir {out}")
