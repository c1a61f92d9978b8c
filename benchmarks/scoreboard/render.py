"""Shows the scoreboard's results: the table in docs/performance.md, and docs/roofline.png."""

import hashlib
import json
from itertools import cycle
from pathlib import Path

from benchmarks.machine import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "scoreboard.json"
DOCUMENT = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "roofline.png"
MARKS = ("<!-- scoreboard -->\n", "<!-- end -->")
NOT_YET = "Not measured yet: `python -m benchmarks.scoreboard`.\n"
KEY = ("shape", "tokens", "routing")
COLORS = (  # ours, peers
    ("tab:blue", "navy", "tab:cyan", "tab:green", "turquoise"),
    ("tab:red", "tab:orange", "black", "tab:purple", "tab:brown", "tab:pink", "gray", "gold"),
)


def is_ours(provider: str) -> bool:
    return provider.startswith("ours")


def table(results: dict | None) -> str:
    """Markdown: the conditions, then a table per verb, with a line per shape and a column per provider."""
    if results is None:
        return NOT_YET
    roofs = results["roofs"]
    bandwidth, peak = (f"{roofs[name] / 1e9:.0f}" if roofs[name] else "-" for name in ("bytes", "flops"))
    busy = f"Other processes used {results['others']:.1f} cores before or after: these numbers say little."
    head = [
        f"Measured by `{results['command']}` in {results['minutes']:.0f} minutes on: {results['conditions']}.",
        f"Roofs, medians over the run: {bandwidth} GB/s, {peak} GFLOP/s.",
        *([busy] if results["busy"] else []),
        "",
        "![Roofline: providers beside the measured roofs](roofline.png)",
        "",
    ]
    verbs = dict.fromkeys(row["verb"] for row in results["rows"])
    return "\n".join(head) + "\n" + "\n".join(_verb(verb, [r for r in results["rows"] if r["verb"] == verb]) for verb in verbs)


def _verb(verb: str, rows: list[dict]) -> str:
    providers = [name for name in dict.fromkeys(row["provider"] for row in rows) if name]
    header = ["shape", "tokens", "routing", *providers, "ours beside the best peer"]
    lines = [header, ["---", "---:", "---", *["---:"] * len(providers), "---"]]
    for key in dict.fromkeys(tuple(row[k] for k in KEY) for row in rows):
        cells = {row["provider"]: row for row in rows if tuple(row[k] for k in KEY) == key}
        if "" in cells:
            lines.append([key[0], str(key[1]), key[2], *[""] * len(providers), cells[""]["note"]])
            continue
        shown = [_cell(cells[name]) if name in cells else "" for name in providers]
        lines.append([key[0], str(key[1]), key[2], *shown, _verdict(cells)])
    notes = [f"- {row['note']}" for row in rows if row["seconds"] and row["note"] not in ("", "one call")]
    body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([f"#### {verb}", "", *body, "", *notes, *([""] if notes else [])])


def _cell(row: dict) -> str:
    """Milliseconds and the share of the roof."""
    if row["seconds"] is None:
        return row["note"]
    ms = 1e3 * row["seconds"]
    share = "" if row["share"] is None else f" ({100 * row['share']:.0f} %)"
    return (f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}") + share + (", one call" if row["note"] == "one call" else "")


def _verdict(cells: dict[str, dict]) -> str:
    """Factor by which each of ours is faster than the fastest peer; below 1 it says that we lose."""
    seconds = {name: row["seconds"] for name, row in cells.items() if row["seconds"]}
    peers = {name: s for name, s in seconds.items() if not is_ours(name)}
    if not peers:
        return ""
    best = min(peers, key=peers.get)
    factors = {name.removeprefix("ours").strip(): peers[best] / s for name, s in seconds.items() if is_ours(name)}
    words = [" ".join(filter(None, (name, "" if f >= 1 else "**loses**", f"{f:.2f}x"))) for name, f in factors.items()]
    return f"{', '.join(words)} ({best})"


def read() -> dict | None:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else None


def write_document(results: dict | None, document: Path = DOCUMENT):
    text = document.read_text()
    before, rest = text.split(MARKS[0], 1)
    after = rest.split(MARKS[1], 1)[1]
    document.write_text(before + MARKS[0] + table(results) + MARKS[1] + after)


def shown_in(document: Path) -> str:
    """What stands between the marks."""
    return document.read_text().split(MARKS[0], 1)[1].split(MARKS[1], 1)[0]


def digest(results: dict) -> str:
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()


def write_picture(results: dict, picture: Path = PICTURE):
    """Left: verbs with products under the roofline, at the share of it that they reached; right: verbs that move data."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    bandwidth, peak = (results["roofs"][name] or 1.0 for name in ("bytes", "flops"))
    measured = [row for row in results["rows"] if row["share"] and "instruction set" not in row["verb"]]
    products, moving = ([r for r in measured if bool(r["flops"]) == kind] for kind in (True, False))
    names = sorted({r["provider"] for r in measured}, key=lambda name: (not is_ours(name), name))
    sides = [name for name in names if is_ours(name)], [name for name in names if not is_ours(name)]
    color = {
        name: shade for side, shades in zip(sides, COLORS, strict=True) for name, shade in zip(side, cycle(shades), strict=False)
    }
    verbs = list(dict.fromkeys(r["verb"] for r in products))
    marker = dict(zip(verbs, "os^Dv*P", strict=False))
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 7), width_ratios=(3, 2), layout="constrained")
    intensities = [r["flops"] / r["bytes"] for r in products]
    for r, intensity in zip(products, intensities, strict=True):
        reached = r["share"] * min(peak, intensity * bandwidth) / 1e9
        face = "none" if r["routing"] == "skewed" else color[r["provider"]]
        left.scatter(intensity, reached, 36, marker=marker[r["verb"]], edgecolors=color[r["provider"]], facecolors=face, alpha=0.8)
    ends = min(intensities, default=1) / 2, max(intensities, default=100) * 2
    left.plot([ends[0], peak / bandwidth, ends[1]], [ends[0] * bandwidth / 1e9, peak / 1e9, peak / 1e9], color="black", zorder=0)
    left.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="GFLOP/s", title="Products (open: skewed routing)")
    left.text(ends[1], peak / 1e9, f"{peak / 1e9:.0f} GFLOP/s", ha="right", va="bottom")
    left.text(ends[0], ends[0] * bandwidth / 1e9 * 1.3, f"{bandwidth / 1e9:.0f} GB/s", ha="left", va="bottom")
    left.grid(alpha=0.3)
    handles = [Line2D([], [], marker=m, linestyle="", color="gray", label=verb) for verb, m in marker.items()]
    handles += [Line2D([], [], marker="o", linestyle="", color=color[name], label=name) for name in names]
    left.legend(handles=handles, fontsize=8, loc="lower right")
    kinds = list(dict.fromkeys(r["verb"] for r in moving))
    for r in moving:
        right.scatter(100 * r["share"], kinds.index(r["verb"]), color=color[r["provider"]], s=36, alpha=0.8)
    right.axvline(100, color="black", zorder=0)
    right.set_yticks(range(len(kinds)), kinds)
    right.set(xlabel="% of the memory bandwidth", title="Verbs that move data", xlim=(0, None))
    right.invert_yaxis()
    right.grid(alpha=0.3, axis="x")
    figure.savefig(picture, dpi=90, metadata={"Description": digest(results)})
    plt.close(figure)
