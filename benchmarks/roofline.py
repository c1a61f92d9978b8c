"""A paper model of the kernels' speed on GPUs: what bytes, operations and whole tiles allow, times one constant per class
of kernels.

    python -m benchmarks.roofline [--write]

A kernel's floor is max(bytes / bandwidth, operations / peak) from datasheets. Its prediction divides the first by the efficiency of
class `memory`, the second by that of class `product` and by the occupancy of its tiles: the share of the slots of whole waves of
tiles of 128 x 128 over the SMs that hold wanted outputs. Each constant is fitted (the geometric mean) on two published figures of
others; the rest of them say how far the model is to be trusted. Nothing here was measured by this project.

Left out: launches, the exchange between ranks (but for `best_minibatch`), attention and everything else that is not the MoE layer.
--write puts the tables into docs/gpu.md and the picture beside it.
"""

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.machine import ROOT

DOCUMENT, PICTURE = ROOT / "docs" / "gpu.md", ROOT / "docs" / "gpu.png"
TILE = 128
ELEMENT_BYTES = {"bf16": 2.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}  # with block scales
TOKENS, DECODED = 8192, 32  # per GPU in a training step; in a decoding step


@dataclass(frozen=True)
class Gpu:
    """Datasheet rates, dense. H200 multiplies block formats as BF16, which is what our kernels decode them to."""

    name: str
    bandwidth: float  # bytes/s
    peak: dict[str, float]  # operations/s
    sms: int


B200 = Gpu("B200", 8.0e12, {"bf16": 2.25e15, "mxfp8": 4.5e15, "nvfp4": 9.0e15}, 148)
H200 = Gpu("H200", 4.8e12, {"bf16": 0.989e15, "mxfp8": 0.989e15, "nvfp4": 0.989e15}, 132)
H800_FP8 = 1.979e15  # operations/s, for a published figure


@dataclass(frozen=True)
class Model:
    """Of one MoE layer."""

    name: str
    experts: int
    top_k: int
    width: int
    expert_width: int
    ranks: tuple[int, ...]  # of expert parallelism


MODELS = (
    Model("DeepSeek-V3", 256, 8, 7168, 2048, (8, 32, 64)),
    Model("Kimi K2", 384, 8, 7168, 2048, (8, 32, 64)),
    Model("Qwen3-235B", 128, 8, 4096, 1536, (1, 8, 32)),
    Model("Qwen3-30B", 128, 8, 2048, 768, (1, 8)),
    Model("gpt-oss-120b", 128, 4, 2880, 2880, (1, 8)),
)


@dataclass(frozen=True)
class Kernel:
    """bytes moved, operations of a format, and the occupancy of its tiles."""

    name: str
    bytes: float
    operations: float = 0.0
    format: str = "bf16"
    occupancy: float = 1.0

    def floor(self, gpu: Gpu) -> float:
        """Seconds."""
        return max(self.bytes / gpu.bandwidth, self.operations / gpu.peak[self.format])

    def predicted(self, gpu: Gpu, efficiency: dict[str, float]) -> float:
        """Seconds."""
        multiply = self.operations / (gpu.peak[self.format] * self.occupancy * efficiency["product"])
        return max(self.bytes / (gpu.bandwidth * efficiency["memory"]), multiply)


@dataclass(frozen=True)
class Figure:
    """A published figure, and the seconds at the floor of what it measured."""

    name: str
    kind: str
    floor: float
    seconds: float  # published
    shown: Callable[[float], str]
    fitted: bool = False


def quantize_bytes(elements: float, copies: int = 1, format: str = "mxfp8") -> float:
    """BF16 in, so many copies out."""
    return elements * (2 + copies * ELEMENT_BYTES[format])


def figures() -> list[Figure]:
    def quantizing(name: str, elements: float, seconds: float, copies: int = 1, fitted: bool = False) -> Figure:
        return Figure(
            name, "memory", quantize_bytes(elements, copies) / B200.bandwidth, seconds, lambda s: f"{s * 1e6:.1f} us", fitted
        )

    def multiplying(name: str, peak: float, rate: float, fitted: bool = False) -> Figure:
        return Figure(name, "product", 1e12 / peak, 1e12 / rate, lambda s: f"{1 / s:.0f} TFLOP/s", fitted)

    cursor = 204_800 * 2048
    return [
        quantizing("TransformerEngine, 8192 x 8192 to MXFP8, row copy, B200", 8192**2, 34.84e-6, fitted=True),
        quantizing("torchao, 131,072 x 7168 to MXFP8, row copy, B200", 131_072 * 7168, 525e-6, fitted=True),
        quantizing("TransformerEngine, column copy", 8192**2, 39.61e-6),
        quantizing("TransformerEngine, both copies", 8192**2, 52.34e-6, copies=2),
        quantizing("Cursor, 204,800 x 2048 to MXFP8 at 6,212 GB/s, B200", cursor, quantize_bytes(cursor) / 6.212e12),
        multiplying("MXFP8 16,384^3, B200", B200.peak["mxfp8"], 2.750e15, fitted=True),
        multiplying("DeepGEMM FP8, H800", H800_FP8, 1.550e15, fitted=True),
        multiplying("MXFP8 grouped, B200", B200.peak["mxfp8"], 2.650e15),
    ]


def efficiencies() -> dict[str, float]:
    """floor / published, by class: the geometric mean over the fitted figures."""
    fitted = [f for f in figures() if f.fitted]
    logs = {kind: [math.log(f.floor / f.seconds) for f in fitted if f.kind == kind] for kind in ("memory", "product")}
    return {kind: math.exp(sum(values) / len(values)) for kind, values in logs.items()}


def errors() -> dict[str, float]:
    """Predicted over published seconds, less 1, of the figures that were not fitted, and of the best minibatch."""
    efficiency = efficiencies()
    found = {f.name: f.floor / efficiency[f.kind] / f.seconds - 1 for f in figures() if not f.fitted}
    return found | {"Mixture-of-Kittens, best minibatch on B200": best_minibatch(B200, 8) / 2368 - 1}


def best_minibatch(gpu: Gpu, top_k: int, tokens: int = 2**16) -> int:
    """Tokens of a minibatch whose experts run while the next one is exchanged, in steps of 32: least time of whole waves of tiles
    over the SMs, and of the first exchange, which nothing hides and which takes as long as its products."""

    def duration(minibatch: int) -> float:
        tiles = math.ceil(minibatch * top_k / TILE)
        return tokens / minibatch * math.ceil(tiles / gpu.sms) + tiles / gpu.sms

    return min(range(32, tokens, 32), key=duration)


def product(gpu: Gpu, name: str, rows: int, outputs: int, contraction: int, experts: int, format: str) -> Kernel:
    """grouped_mm with even groups."""
    moved = (rows + experts * outputs) * contraction * ELEMENT_BYTES[format] + 2 * rows * outputs
    tiles = experts * math.ceil(rows / experts / TILE) * math.ceil(outputs / TILE)
    occupancy = rows * outputs / TILE**2 / (math.ceil(tiles / gpu.sms) * gpu.sms)
    return Kernel(name, moved, 2.0 * rows * outputs * contraction, format, occupancy)


def gradient(gpu: Gpu, name: str, rows: int, outputs: int, contraction: int, experts: int, format: str) -> Kernel:
    """grouped_mm_wgrad with even groups, into FP32."""
    moved = rows * (outputs + contraction) * ELEMENT_BYTES[format] + 4 * experts * outputs * contraction
    tiles = experts * math.ceil(outputs / TILE) * math.ceil(contraction / TILE)
    padded = experts * math.ceil(rows / experts / TILE) * TILE
    occupancy = experts * outputs * contraction / TILE**2 / (math.ceil(tiles / gpu.sms) * gpu.sms) * rows / padded
    return Kernel(name, moved, 2.0 * rows * outputs * contraction, format, occupancy)


def training_step(gpu: Gpu, model: Model, ranks: int, recipe: str) -> list[Kernel]:
    """The kernels of one layer on one rank, forward and backward, with TOKENS tokens of its own."""
    experts, d, f = model.experts // ranks, model.width, model.expert_width
    n, forward, backward = TOKENS * model.top_k, recipe, "bf16" if recipe == "bf16" else "mxfp8"
    quantized = recipe != "bf16"
    out = (ELEMENT_BYTES[forward] + ELEMENT_BYTES[backward]) if quantized else 2.0  # an activation: for this product and for wgrad
    both = 2 * ELEMENT_BYTES[backward] if quantized else 2.0  # a gradient
    kernels = [
        Kernel("route", TOKENS * (4.0 * model.experts + 8 * model.top_k)),
        Kernel("permute", n * d * (2 + out)),
        product(gpu, "up", n, 2 * f, d, experts, forward),
        Kernel("swiglu", n * f * (4 + out)),
        product(gpu, "down", n, d, f, experts, forward),
        Kernel("unpermute", n * d * 2.0 + TOKENS * d * 2),
        Kernel("unpermute backward", n * d * (4 + both)),
        product(gpu, "down dgrad", n, f, d, experts, backward),
        gradient(gpu, "down wgrad", n, d, f, experts, backward),
        Kernel("swiglu backward", n * f * (6 + 2 * both)),
        product(gpu, "up dgrad", n, d, 2 * f, experts, backward),
        gradient(gpu, "up wgrad", n, 2 * f, d, experts, backward),
        Kernel("permute backward", n * d * 2.0 + TOKENS * d * 2),
    ]
    weights = 3.0 * experts * d * f
    return [Kernel("quantize weights", weights * (2 + out)), *kernels] if quantized else kernels


def decoding_step(model: Model, ranks: int, recipe: str) -> Kernel:
    """moe_decode of DECODED tokens: the weights of the experts that they hit, read once."""
    hit = model.experts / ranks * (1 - (1 - model.top_k / model.experts) ** DECODED)
    moved = 3.0 * hit * model.width * model.expert_width * ELEMENT_BYTES[recipe]
    return Kernel("moe_decode", moved, 6.0 * DECODED * model.top_k / ranks * model.width * model.expert_width, recipe, 1 / 8)


def rows_of(gpu: Gpu) -> list[tuple[str, int, dict[str, tuple[float, float]], dict[str, float]]]:
    """(model, ranks, recipe -> (floor, predicted) of a step, recipe -> predicted decoding), seconds."""
    efficiency, found = efficiencies(), []
    for model in MODELS:
        for ranks in model.ranks:
            steps = {recipe: training_step(gpu, model, ranks, recipe) for recipe in ELEMENT_BYTES}
            times = {r: (sum(k.floor(gpu) for k in ks), sum(k.predicted(gpu, efficiency) for k in ks)) for r, ks in steps.items()}
            decoding = {recipe: decoding_step(model, ranks, recipe).predicted(gpu, efficiency) for recipe in ELEMENT_BYTES}
            found.append((model.name, ranks, times, decoding))
    return found


def markdown() -> str:
    """The tables of docs/gpu.md."""
    efficiency, wrong = efficiencies(), errors()
    lines = [
        f"Efficiency: memory {efficiency['memory']:.3f}, product {efficiency['product']:.3f}.",
        "",
        "| published by others | published | predicted | error |",
        "|---|---|---|---|",
    ]
    for f in figures():
        error = "fitted" if f.fitted else f"{100 * wrong[f.name]:+.0f} %"
        lines.append(f"| {f.name} | {f.shown(f.seconds)} | {f.shown(f.floor / efficiency[f.kind])} | {error} |")
    minibatch = best_minibatch(B200, 8)
    error = f"{100 * (minibatch / 2368 - 1):+.0f} %"
    lines.append(f"| Mixture-of-Kittens, best minibatch on B200 | 2368 tokens | {minibatch} tokens | {error} |")
    for gpu in (B200, H200):
        lines += [
            "",
            f"**{gpu.name}, predicted, not measured.** One layer, forward and backward, {TOKENS} tokens per GPU: "
            "floor / prediction in ms",
            f"and the speed-up over BF16; decoding {DECODED} tokens: prediction in us.",
            "",
            "| model | EP | bf16 | mxfp8 | speed-up | nvfp4 | speed-up | decode bf16 | mxfp8 | nvfp4 |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for name, ranks, times, decoding in rows_of(gpu):
            ms = {r: f"{1e3 * low:.2f} / {1e3 * predicted:.2f}" for r, (low, predicted) in times.items()}
            faster = {r: f"{times['bf16'][1] / predicted:.2f}" for r, (_, predicted) in times.items()}
            us = [f"{1e6 * seconds:.0f}" for seconds in decoding.values()]
            cells = [name, str(ranks), ms["bf16"], ms["mxfp8"], faster["mxfp8"], ms["nvfp4"], faster["nvfp4"], *us]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot():
    """Speed-ups of a step over BF16."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, gpu in zip(axes, (B200, H200), strict=True):
        rows = rows_of(gpu)
        for i, recipe in enumerate(("mxfp8", "nvfp4")):
            faster = [times["bf16"][1] / times[recipe][1] for _, _, times, _ in rows]
            axis.barh([y + 0.4 * i for y in range(len(rows))], faster, 0.4, label=recipe)
        axis.set_yticks([y + 0.2 for y in range(len(rows))], [f"{name}, EP {ranks}" for name, ranks, _, _ in rows])
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{gpu.name}: MoE layer over BF16, predicted, not measured", fontsize=9)
        axis.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=100, metadata={"Software": None})


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put tables and picture into docs")
    if parser.parse_args(argv).write:
        between = re.compile(r"(<!-- roofline -->\n).*?(\n<!-- end -->)", re.S)
        DOCUMENT.write_text(between.sub(lambda m: m[1] + markdown() + m[2], DOCUMENT.read_text()))
        plot()
    else:
        print("Predicted, not measured.\n\n" + markdown())


if __name__ == "__main__":
    main()
