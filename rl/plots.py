"""What a run ends with: a table and a picture of what it learned, on tasks it never trained on and in training."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from rl.heldout import gain
from training.metrics import read_metrics

PICTURE, TABLE = "run.png", "table.txt"


def conclude(run_dir: Path) -> str:
    """Draws the picture, writes and prints the table; returns it."""
    records = read_metrics(run_dir / "metrics.jsonl")
    draw(records, run_dir)
    text = table(records, run_dir)
    (run_dir / TABLE).write_text(text + "\n")
    print(f"\n{text}\n\npicture: {run_dir / PICTURE}    curves: tensorboard --logdir {run_dir}")
    return text


def evaluations(run_dir: Path) -> list[dict]:
    """Those that are saved, in the order of their versions: before, in between, after."""
    found = {path.stem: json.loads(path.read_text()) for path in (run_dir / "evaluations").glob("*.json")}
    order = {"before": -1, "after": 1}
    return [content | {"name": name} for name, content in sorted(found.items(), key=lambda e: (order.get(e[0], 0), e[0]))]


def table(records: list[dict], run_dir: Path) -> str:
    """Held-out tasks before, during and after, and what the run took."""
    lines = [f"{'held out':16} {'version':>7} {'tasks':>6} {'mean':>14} {'best of':>8} {'':>14} {'calls parse':>12}"]
    found = evaluations(run_dir)
    for e in found:
        lines.append(
            f"{e['name']:16} {e['version']:7d} {e['tasks']:6d} {100 * e['mean']:7.1f} ± {100 * e['mean_error']:3.1f} % "
            f"{e['samples']:7d} {100 * e['best']:8.1f} ± {100 * e['best_error']:3.1f} % {100 * e['parsed']:10.1f} %"
        )
    ends = {e["name"]: e for e in found if e["name"] in ("before", "after")}
    if len(ends) == 2:
        for name, (difference, error) in gain(ends["before"], ends["after"]).items():
            ratio = difference / error if error else float("inf") if difference else 0.0
            lines.append(f"{name}: {100 * difference:+.1f} points, paired by task, {ratio:.1f} standard errors")
    steps = [record for record in records if "reward" in record]
    if steps:
        seconds, samples = steps[-1]["seconds"], sum(step["samples"] for step in steps)
        lines.append(
            f"{len(steps)} steps, {samples} samples in {seconds / 60:.1f} minutes: {samples / max(seconds, 1e-9):.1f} a second; "
            f"staleness at most {max(step['staleness'] for step in steps)}; "
            f"longest pause for weights {1e3 * max(step['pause_s'] for step in steps):.0f} ms"
        )
    return "\n".join(lines)


def draw(records: list[dict], run_dir: Path) -> None:
    steps = [record for record in records if "reward" in record]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    x = [step["step"] for step in steps]
    for name in ("solved", "best"):
        left.plot(x, [step[name] for step in steps], label={"solved": "mean", "best": "best of a group"}[name])
    left.set(title="training tasks", xlabel="step", ylabel="solved", ylim=(0, 1))
    for kind, samples in (("in between", None), ("before and after", "ends")):
        chosen = [e for e in evaluations(run_dir) if (e["name"] in ("before", "after")) == (samples == "ends")]
        for name in ("mean", "best") if samples else ("mean",):
            style = dict(marker="o", linestyle="-" if samples else ":", capsize=3)
            error = [e[f"{name}_error"] for e in chosen]
            middle.errorbar([e["version"] for e in chosen], [e[name] for e in chosen], error, label=f"{name}, {kind}", **style)
    middle.set(title="held-out tasks", xlabel="version", ylim=(0, 1))
    right.plot(x, [step["samples_per_s"] for step in steps], label="samples/s")
    right.plot(x, [step["staleness"] for step in steps], label="staleness, versions")
    right.plot(x, [step["step_s"] for step in steps], label="learner's step, s")
    right.set(title="speed", xlabel="step")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(run_dir / PICTURE, dpi=110)
    pyplot.close(figure)
