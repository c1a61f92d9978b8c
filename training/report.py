"""What a finished run shows: time of its MoE layer, the table, and the picture of the losses."""

import statistics
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from training.model import Model

COLOURS = {"fp32": "#8d99ae", "bf16": "#2b2d42", "mxfp8": "#0a9396", "nvfp4": "#e76f51"}
INK, FAINT = "#2b2d42", "#d9dce3"
STYLE = {
    "font.size": 10, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.edgecolor": FAINT, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
MARKER = dict(markersize=7, markeredgecolor="white", markeredgewidth=1.2)
COLUMNS = (
    ("recipe", "recipe", "{}"),
    ("heldout_loss", "held-out loss", "{:.4f}"),
    ("difference", "vs bf16", "{:+.2f} %"),
    ("tokens_per_s", "tokens/s", "{:.0f}"),
    ("moe_forward_ms", "MoE forward ms", "{:.1f}"),
    ("moe_backward_ms", "MoE backward ms", "{:.1f}"),
    ("heldout_max_violation", "max violation", "{:.2f}"),
)


@torch.no_grad()
def moe_input(model: Model, ids_BS: Tensor) -> Tensor:
    """What the model's first MoE layer reads for these ids."""
    captured = []
    hook = model.moe_layers[0].register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    model(ids_BS)
    hook.remove()
    return captured[0]


def time_moe(models: dict[str, Model], ids_BS: Tensor, rounds: int = 9) -> dict[str, dict[str, float]]:
    """Median milliseconds of forward and backward of the first MoE layer of each model, weight quantization included.

    The models take turns, so that a machine that slows down slows all of them.
    """
    inputs = {name: moe_input(model, ids_BS) for name, model in models.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, model in models.items():
            layer, x = model.moe_layers[0], inputs[name].clone().requires_grad_()
            with torch.no_grad():
                for weight in layer.parameters():
                    weight.mul_(1.0)  # a new version, as after an optimizer step
                    weight.grad = None
            start = time.perf_counter()
            with model.autocast(x.device):
                y = layer(x)[0]
            middle = time.perf_counter()
            y.backward(torch.ones_like(y))
            times[name].append((middle - start, time.perf_counter() - middle))
    report = {}
    for name, rounds_of in times.items():
        forward, backward = (1e3 * statistics.median(column) for column in zip(*rounds_of[1:], strict=True))
        report[name] = {"moe_forward_ms": forward, "moe_backward_ms": backward}
    return report


def table(results: list[dict]) -> str:
    """Aligned text, one line per result, columns as in COLUMNS; the difference is to bf16's result where there is
    one."""
    base = next((r["heldout_loss"] for r in results if r["recipe"] == "bf16"), None)
    if base and len(results) > 1:
        results = [r | {"difference": 100.0 * (r["heldout_loss"] / base - 1.0)} for r in results]
    columns = [(key, title, form) for key, title, form in COLUMNS if all(key in r for r in results)]
    lines = [[title for _, title, _ in columns]] + [[form.format(r[key]) for key, _, form in columns] for r in results]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def smooth(values: list[float]) -> list[float]:
    """Mean of each value and its neighbours, 4 % of the run on either side. The window shrinks towards the start, where
    the loss falls steeply, and is cut at the end."""
    reach = len(values) * 4 // 100
    return [statistics.fmean(values[i - min(reach, i) : i + min(reach, i) + 1]) for i in range(len(values))]


def plot_losses(records: list[dict], path: Path, title: str) -> None:
    """Training losses, smoothed, with the held-out losses on them; below, where records hold bf16 and another recipe,
    the difference of the held-out losses."""
    recipes = dict.fromkeys(record["recipe"] for record in records)
    training = {recipe: {r["step"]: r["loss"] for r in records if r["recipe"] == recipe and r.get("loss")} for recipe in recipes}
    heldout = {
        recipe: {r["step"]: r["heldout_loss"] for r in records if r["recipe"] == recipe and r.get("heldout_loss")}
        for recipe in recipes
    }
    compared = [recipe for recipe in recipes if recipe != "bf16" and heldout[recipe].keys() & heldout.get("bf16", {}).keys()]
    with plt.rc_context(STYLE):
        size, ratios = ((9, 6.2), [3, 1]) if compared else ((9, 4.8), [1])
        figure, axes = plt.subplots(
            len(ratios), 1, sharex=True, squeeze=False, figsize=size, height_ratios=ratios, layout="constrained"
        )
        _draw_losses(axes[0, 0], training, heldout)
        if compared:
            _draw_differences(axes[1, 0], {recipe: heldout[recipe] for recipe in compared}, heldout["bf16"])
        for axis in axes[:, 0]:
            axis.grid(axis="y", color=FAINT, linewidth=0.7)
            axis.set_axisbelow(True)
            axis.tick_params(length=0)
        axes[0, 0].set_title(title, loc="left", fontsize=13, fontweight="bold", pad=14)
        axes[-1, 0].set_xlabel("optimizer step")
        axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[-1, 0].margins(x=0.01)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _draw_losses(axis: Axes, training: dict[str, dict[int, float]], heldout: dict[str, dict[int, float]]) -> None:
    for rank, (recipe, losses) in enumerate(training.items()):  # thinner and thinner: curves that coincide stay visible
        colour, points = COLOURS[recipe], heldout[recipe]
        axis.plot(losses.keys(), losses.values(), color=colour, alpha=0.13, linewidth=0.8)
        axis.plot(losses.keys(), smooth(list(losses.values())), color=colour, linewidth=max(1.4, 4.2 - 1.4 * rank))
        label = f"{recipe}   held-out {list(points.values())[-1]:.3f}" if points else recipe
        axis.plot(
            points.keys(),
            points.values(),
            "o",
            color=colour,
            label=label,
            zorder=3,
            **MARKER | dict(markersize=max(5, 10 - 2.5 * rank)),
        )
    axis.set_ylabel("loss, nats per token")
    axis.legend(frameon=False, loc="upper right")


def _draw_differences(axis: Axes, heldout: dict[str, dict[int, float]], base: dict[int, float]) -> None:
    axis.axhline(0.0, color=COLOURS["bf16"], linewidth=1.2)
    for recipe, losses in heldout.items():
        difference = {step: 100.0 * (losses[step] / base[step] - 1.0) for step in losses if step in base}
        axis.plot(difference.keys(), difference.values(), "o-", color=COLOURS[recipe], linewidth=1.4, **MARKER)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, -1.0), max(high, 1.0))
    axis.set_ylabel("held-out loss,\n% above bf16")
