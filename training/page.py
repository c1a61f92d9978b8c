"""`python -m training report RUN...`: one self-contained HTML page of runs, their phases and their comparison.

Losses (training smoothed, held-out as points), learning rate, gradient norms, throughput, memory, and the load of every expert
over layers and time. Several runs share the axes; a run that began with another's weights (`init`) goes on where that one ended,
with a line at the boundary. Everything is inline SVG: no script is needed to read it, and nothing is loaded from elsewhere. A
directory that holds runs (a demo's) stands for all of them.
"""

import base64
import json
import math
import struct
import zlib
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from training.metrics import LOADS, METRICS, read_metrics
from training.report import COLOURS, smooth

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 220, 58, 26, 10, 12
PALETTE = (*COLOURS.values(), "#7b2cbf", "#bc6c25", "#588157", "#c1121f")
POINTS = 600  # of a curve
PANELS = (  # key of the metrics, title, unit, whether smoothed
    ("loss", "Training loss", "nats per token", True),
    ("heldout_loss", "Held-out loss", "nats per token", False),
    ("heldout_bits_per_byte", "Held-out bits per byte", "bits", False),
    ("lr", "Learning rate", "", False),
    ("grad_norm", "Gradient norm before clipping", "", True),
    ("tokens_per_s", "Throughput", "tokens per second", True),
    ("peak_gb", "Most memory held", "GB", False),
    ("max_violation", "Imbalance of the experts", "max / mean - 1", True),
    ("data_share", "Share of a step spent on data", "", True),
)
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #2b2d42; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem } h2 { font-size: 1.05rem; margin: 1.6rem 0 .2rem } svg { width: 100%; height: auto; display: block }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0 } th { text-align: left; font-weight: 600 }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #d9dce3 }
td { text-align: right } td:first-child { text-align: left }
text { font-size: 11px; fill: #6b7080 } .swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px }
details { margin: .6rem 0 } pre { overflow-x: auto; background: #f5f6f8; padding: .8rem; font-size: 12px }
"""


@dataclass
class RunData:
    """What one run has left in its directory."""

    name: str
    config: dict
    records: list[dict]
    loads: list[dict]
    offset: int = 0  # tokens trained by the runs that it goes on from
    boundaries: list[tuple[int, str]] = field(default_factory=list)  # tokens at which phases begin

    @property
    def tokens_per_step(self) -> int:
        return self.config["accumulation"] * self.config["batch_size"] * self.config["seq_len"]

    def curve(self, key: str) -> list[tuple[float, float]]:
        """(tokens so far, value)."""
        points = [(r["step"], r[key]) for r in self.records if r.get(key) is not None]
        return [(self.offset + step * self.tokens_per_step, value) for step, value in points]

    @property
    def tokens(self) -> int:
        return max((r["step"] for r in self.records), default=0) * self.tokens_per_step


def read_runs(paths: list[Path]) -> list[RunData]:
    """FileNotFoundError for a directory without a run."""
    runs: list[RunData] = []
    for path in paths:
        found = [path] if (path / "config.json").exists() else sorted(p.parent for p in path.glob("*/config.json"))
        if not found:
            raise FileNotFoundError(f"no run in {path}")
        for run_dir in found:
            config = _config(run_dir / "config.json")
            name = str(run_dir) if len(paths) > 1 or len(found) == 1 else run_dir.name
            runs.append(RunData(name, config, read_metrics(run_dir / METRICS), read_metrics(run_dir / LOADS)))
    by_dir = {str(Path(run.config["run_dir"]).resolve()): run for run in runs}
    for run in runs:
        chain, at = [], run
        while at.config.get("init") and (before := by_dir.get(str(Path(at.config["init"]).resolve()))) not in (None, *chain, at):
            chain.append(before)
            at = before
        run.offset = sum(before.tokens for before in chain)
        run.boundaries = [(run.offset, run.config.get("phase", "run"))] if chain else []
    return runs


def _config(path: Path) -> dict:
    """ValueError where it is not that of a run."""
    try:
        config = json.loads(path.read_text())
        if {"run_dir", "recipe", "accumulation", "batch_size", "seq_len"} <= set(config):
            return config
        reason = "it is not the configuration of a run"
    except (ValueError, TypeError) as error:
        reason = str(error)
    raise ValueError(f"{path} cannot be read: {reason}")


def write_page(paths: list[Path], out: Path) -> Path:
    """The page of these runs."""
    runs = read_runs(paths)
    parts = [_table(runs)]
    for key, title, unit, is_smoothed in PANELS:
        curves = [run.curve(key) for run in runs]
        if any(len(curve) > 1 for curve in curves):
            parts.append(f"<h2>{title}{f', {unit}' if unit else ''}</h2>{_chart(runs, curves, is_smoothed, key)}")
    for run in runs:
        if run.loads:
            parts.append(f"<h2>Load of the experts, {escape(run.name)}</h2>{_heat_map(run)}")
    for run in runs:
        config = escape(json.dumps(run.config, indent=1))
        parts.append(f"<details><summary>Configuration of {escape(run.name)}</summary><pre>{config}</pre></details>")
    title = escape(", ".join(run.name for run in runs))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style>'
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"<!doctype html><html lang=en><head>{head}</head><body><h1>Training</h1>{''.join(parts)}</body></html>\n")
    return out


def _colour(idx: int, run: RunData, runs: list[RunData]) -> str:
    recipes = [r.config["recipe"] for r in runs]
    return COLOURS[run.config["recipe"]] if len(set(recipes)) == len(recipes) else PALETTE[idx % len(PALETTE)]


def _table(runs: list[RunData]) -> str:
    rows = []
    for idx, run in enumerate(runs):
        last = {key: points[-1][1] if (points := run.curve(key)) else None for key in ("loss", "heldout_loss", "tokens_per_s")}
        cells = [f"{run.tokens:,}"] + ["–" if v is None else f"{v:.4f}" if v < 100 else f"{v:.0f}" for v in last.values()]
        skipped = max((r.get("skipped", 0) for r in run.records), default=0)
        name = f'<span class="swatch" style="background:{_colour(idx, run, runs)}"></span> {escape(run.name)}'
        cells = [name, run.config.get("phase", ""), run.config["recipe"], *cells, str(skipped)]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    titles = ("run", "phase", "recipe", "tokens", "last loss", "held-out loss", "tokens/s", "skipped steps")
    return "<table><tr>" + "".join(f"<th>{title}</th>" for title in titles) + f"</tr>{''.join(rows)}</table>"


def _ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers within a range."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-12) / count))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= count)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def _chart(runs: list[RunData], curves: list[list[tuple[float, float]]], is_smoothed: bool, key: str) -> str:
    xs = [x for curve in curves for x, _ in curve]
    ys = sorted(y for curve in curves for _, y in curve)
    low, high = ys[0], ys[-1]
    if is_smoothed and len(ys) > 100:  # a few outliers do not flatten the rest
        low, high = ys[len(ys) // 200], ys[-1 - len(ys) // 200]
    low, high = (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)) if low == high else (low, high)
    margin = 0.04 * (high - low)
    low, high, last = low - margin, high + margin, max(xs)

    def px(x: float) -> float:
        return round(LEFT + x / last * (WIDTH - LEFT - RIGHT), 1)

    def py(y: float) -> float:
        return round(TOP + (high - min(max(y, low), high)) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    svg = []
    for tick in _ticks(low, high):
        svg.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick)}" y2="{py(tick)}" stroke="#e6e8ee"/>')
        svg.append(f'<text x="{LEFT - 6}" y="{py(tick) + 4}" text-anchor="end">{_short(tick)}</text>')
    for tick in _ticks(0, last, 6):
        svg.append(f'<text x="{px(tick)}" y="{HEIGHT - 8}" text-anchor="middle">{_short(tick)}</text>')
    for run in runs:
        for x, phase in run.boundaries:
            svg.append(
                f'<line x1="{px(x)}" x2="{px(x)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#8d99ae" stroke-dasharray="4 3"/>'
            )
            svg.append(f'<text x="{px(x) + 4}" y="{TOP + 10}">{escape(phase)}</text>')
    for idx, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        if curve:
            svg += _curve(run, curve, is_smoothed, _colour(idx, run, runs), px, py)
    label = f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end" dy="-14">tokens</text>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{key}">{"".join(svg)}{label}</svg>'


def _curve(run: RunData, curve: list[tuple[float, float]], is_smoothed: bool, colour: str, px, py) -> list[str]:
    thin = curve[:: max(1, len(curve) // POINTS)]

    def line(ys: list[float], width: float, opacity: float) -> str:
        path = " ".join(f"{px(x)},{py(y)}" for (x, _), y in zip(thin, ys, strict=True))
        return (
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}">'
            f"<title>{escape(run.name)}: last {curve[-1][1]:.5g}</title></polyline>"
        )

    values = [y for _, y in thin]
    lines = [line(values, 0.8, 0.25), line(smooth(values), 1.8, 1.0)] if is_smoothed else [line(values, 1.8, 1.0)]
    for x, y in curve if len(curve) <= 60 else ():
        title = f"<title>{escape(run.name)}, {_short(x)} tokens: {y:.5g}</title>"
        lines.append(f'<circle cx="{px(x)}" cy="{py(y)}" r="3" fill="{colour}">{title}</circle>')
    return lines


def _heat_map(run: RunData) -> str:
    """A row of pixels per layer and expert, a column per record; white is the fair share, red twice it or more, blue nothing."""
    columns = run.loads[:: max(1, len(run.loads) // POINTS)]
    layers, experts = len(columns[0]["loads"]), len(columns[0]["loads"][0])
    height, gap = max(24, min(96, 3 * experts)), 4
    svg = []
    for layer in range(layers):
        shares = [[rows * experts / (sum(record["loads"][layer]) or 1) for rows in record["loads"][layer]] for record in columns]
        pixels = [[_shade(shares[i][expert]) for i in range(len(columns))] for expert in range(experts)]
        y, busiest = layer * (height + gap), max(max(share) for share in shares)
        svg.append(
            f'<image x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{height}" preserveAspectRatio="none" '
            f'style="image-rendering:pixelated" href="data:image/png;base64,{_png(pixels)}">'
            f"<title>layer {layer}: the busiest expert had {busiest:.2f} of its share</title></image>"
            f'<text x="{LEFT - 6}" y="{y + height / 2 + 4:.0f}" text-anchor="end">MoE {layer}</text>'
        )
    total = layers * (height + gap) + 16
    svg.append(f'<text x="{LEFT}" y="{total - 3}">step {columns[0]["step"]}</text>')
    svg.append(f'<text x="{WIDTH - RIGHT}" y="{total - 3}" text-anchor="end">step {columns[-1]["step"]}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {total}" role="img" aria-label="expert load">{"".join(svg)}</svg>'


def _shade(share: float) -> tuple[int, int, int]:
    """Of the fair share: 0 blue, 1 white, 2 and more red."""
    amount = min(1.0, abs(share - 1.0))
    far = (193, 18, 31) if share > 1 else (10, 107, 163)
    return tuple(round(255 + (c - 255) * amount) for c in far)


def _png(pixels: list[list[tuple[int, int, int]]]) -> str:
    """Base64 of an RGB image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + bytes(c for pixel in row for c in pixel) for row in pixels)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()
