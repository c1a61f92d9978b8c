"""One self-contained HTML page of runs: the table, accuracy against cost and tokens, comparisons, and every attempt down to its
transcript and diff. Everything is in the file; the one script opens what a link leads to."""

import json
from collections.abc import Sequence
from html import escape

from rl.evals.runner import Result, place
from rl.evals.summary import HEADS, Summary, cells, differs, pareto

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 430, 260, 44, 34, 12, 16
MOST = 4000  # characters shown of one text
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #2b2d42; margin: 2rem auto; max-width: 64rem; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem } .plots { display: flex; flex-wrap: wrap; gap: 1rem }
svg { width: 430px; max-width: 100%; height: auto } svg text { font-size: 11px; fill: #6b7080 } svg a circle { fill: #1d6fb8 }
svg a:hover circle { fill: #c1121f }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0 }
th { text-align: left; font-weight: 600 }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #d9dce3; vertical-align: top }
details { margin: .35rem 0 .35rem .6rem } summary { cursor: pointer } .wide { overflow-x: auto }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f6f8; padding: .6rem; font-size: 12px }
.add { color: #17692d } .del { color: #a4121c }
.ok { color: #17692d } .no { color: #a4121c } .call { color: #1d6fb8; font-weight: 600 }
"""
SCRIPT = """
function show() {
  let e = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let up = e; up; up = up.parentElement) if (up.tagName == 'DETAILS') up.open = true;
  if (e) e.scrollIntoView();
}
addEventListener('hashchange', show); addEventListener('load', show);
"""


def page(summaries: Sequence[Summary], title: str = "Evaluations") -> str:
    """The page of these runs."""
    runs = list(enumerate(summaries))
    body = [f"<h1>{escape(title)}</h1>", table(HEADS, [(link(f"run{i}", s.name), *map(escape, cells(s)[1:])) for i, s in runs])]
    body += ['<h2 id="pareto">Accuracy against what it takes</h2><div class="plots">']
    body += [plot([(s.tokens, s) for s in summaries], "completion tokens per attempt")]
    if any(s.cost is not None for s in summaries):
        body += [plot([(s.cost, s) for s in summaries if s.cost is not None], "dollars per attempt")]
    body += ["</div>", comparisons(summaries), *(section(i, s) for i, s in runs)]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(body)}<script>{SCRIPT}</script></body></html>"


def link(anchor: str, text: str) -> str:
    return f'<a href="#{anchor}">{escape(text)}</a>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML."""
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{escape(h)}</th>" for h in heads)}</tr>{lines}</table></div>'


def plot(points: list[tuple[float, Summary]], label: str) -> str:
    """Accuracy over `label`, with intervals; a line joins those that no other run beats. A point leads to its run."""
    known = [(x, s) for x, s in points if s.average is not None]
    most = max([x for x, _ in known], default=0) * 1.1 or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / most * (WIDTH - LEFT - RIGHT), TOP + (1 - y) * (HEIGHT - TOP - BOTTOM)

    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="accuracy over {escape(label)}">']
    for y in (0, 0.25, 0.5, 0.75, 1):
        (x0, py), (x1, _) = at(0, y), at(most, y)
        out.append(f'<path d="M{x0} {py:.1f}H{x1}" stroke="#e4e6ec"/>')
        out.append(f'<text x="{x0 - 6}" y="{py + 4:.1f}" text-anchor="end">{100 * y:.0f} %</text>')
    for share in (0, 0.5, 1):
        px, py = at(most * share, 0)
        out.append(f'<text x="{px:.1f}" y="{py + 14:.1f}" text-anchor="middle">{most * share:,.4g}</text>')
    out.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(label)}</text>')
    front = [at(known[i][0], known[i][1].average.mean) for i in pareto([(x, s.average.mean) for x, s in known])]
    steps = "".join(f"H{x:.1f}V{y:.1f}" if i else f"M{x:.1f} {y:.1f}" for i, (x, y) in enumerate(front))
    out.append(f'<path class="front" d="{steps}" fill="none" stroke="#7b9cc0" stroke-dasharray="4 3"/>')
    for x, s in known:
        (px, py), (_, low), (_, high) = at(x, s.average.mean), at(x, s.average.low), at(x, s.average.high)
        anchor = s.directory.name
        about = f"{s.name}: {100 * s.average.mean:.1f} % at {x:,.4g} {label}"
        out.append(f'<a href="#run-{escape(anchor, quote=True)}" class="point"><title>{escape(about)}</title>')
        out.append(f'<path d="M{px:.1f} {high:.1f}V{low:.1f}" stroke="#9aa3b2"/><circle cx="{px:.1f}" cy="{py:.1f}" r="5"/>')
        side, anchored = (-8, "end") if px > 0.7 * WIDTH else (8, "start")
        out.append(f'<text x="{px + side:.1f}" y="{py - 6:.1f}" text-anchor="{anchored}">{escape(s.name[:24])}</text></a>')
    return "".join(out) + "</svg>"


def comparisons(summaries: Sequence[Summary]) -> str:
    rows = []
    for i, first in enumerate(summaries):
        for second in summaries[i + 1 :]:
            found = differs(first, second)
            if found is not None:
                difference = f"{100 * found.difference:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
                verdict = "yes" if found.significant else "no"
                rows.append(
                    (escape(second.name), escape(first.name), difference, f"{found.p_value:.3g}", verdict, str(found.tasks))
                )
    heads = ("run", "less", "difference, % (95 %)", "p", "significant", "tasks of both")
    return f'<h2 id="comparisons">Comparisons, task by task</h2>{table(heads, rows)}' if rows else ""


def section(number: int, s: Summary) -> str:
    pins = {key: value for key, value in s.pins.items() if key != "tasks"}
    out = [f'<h2 id="run{number}"><span id="run-{escape(s.directory.name, quote=True)}">{escape(s.name)}</span></h2>']
    out.append(f"<details><summary>What it is pinned to</summary><pre>{escape(json.dumps(pins, indent=1))}</pre></details>")
    rows = [(f"best of {k}", f"{100 * e.mean:.1f} ({100 * e.low:.1f} to {100 * e.high:.1f})") for k, e in enumerate(s.best, 1)]
    out.append(table(("k", "%"), rows))
    by_task: dict[str, list[Result]] = {}
    for result in s.results:
        by_task.setdefault(result.task, []).append(result)
    for j, (task, results) in enumerate(by_task.items()):
        graded = [result.score for result in results if result.score is not None]
        average = f"{100 * sum(graded) / len(graded):.0f} %" if graded else "no score"
        attempts = "".join(attempt(s, result, f"run{number}-task{j}-{result.attempt}") for result in results)
        out.append(
            f'<details class="task" id="run{number}-task{j}"><summary>{escape(task)}: {average}</summary>{attempts}</details>'
        )
    return "".join(out)


def attempt(s: Summary, result: Result, anchor: str) -> str:
    score = "no score" if result.score is None else f"{100 * result.score:.0f} %"
    took = f"{result.completion_tokens} tokens, {result.calls} calls, {result.seconds:.1f} s"
    about = f"attempt {result.attempt + 1}: {score}, {result.status}, {took}"
    marks = {True: '<div class="ok">met: ', False: '<div class="no">missed: '}
    criteria = "".join(f"{marks[fine]}{escape(name)}</div>" for name, fine in result.criteria.items())
    patch_file, run_file = place(s.directory, "patches", result, "diff"), place(s.directory, "trajectories", result, "json")
    patch = patch_file.read_bytes().decode("utf-8", "replace") if patch_file.exists() else ""
    try:
        steps = json.loads(run_file.read_text("utf-8"))["steps"] if run_file.exists() else []
        said = "".join(map(step, steps))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        steps, said = [], f"<div>{escape(f'{run_file} is damaged: {type(error).__name__}: {error}')}</div>"
    reason = f"<div>{escape(result.reason)}</div>" if result.reason else ""
    return (
        f'<details class="attempt" id="{anchor}"><summary>{escape(about)}</summary>{reason}{criteria}'
        f'<details class="diff"><summary>Diff, {result.changed_lines} lines</summary><pre>{coloured(patch)}</pre></details>'
        f'<details class="transcript"><summary>Transcript, {len(steps)} steps</summary>'
        f"{said}</details></details>"
    )


def cut(text: str) -> str:
    return escape(text if len(text) <= MOST else f"{text[:MOST]}\n... {len(text) - MOST} more characters")


def coloured(patch: str) -> str:
    kinds = {"+": "add", "-": "del"}
    lines = (patch if len(patch) <= 10 * MOST else patch[: 10 * MOST] + "\n...").splitlines()
    return "\n".join(
        f'<span class="{kinds[line[0]]}">{escape(line)}</span>' if line[:1] in kinds else escape(line) for line in lines
    )


def step(entry: dict) -> str:
    out = [f"<div><b>{escape(entry['source'])}</b></div>"]
    if entry.get("reasoning_content"):
        out.append(f"<details><summary>thinking</summary><pre>{cut(entry['reasoning_content'])}</pre></details>")
    if entry["message"]:
        out.append(f"<pre>{cut(entry['message'])}</pre>")
    results = {found["source_call_id"]: found["content"] for found in (entry.get("observation") or {}).get("results", ())}
    for call in entry.get("tool_calls") or ():
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        out.append(f'<div class="call">{escape(call["function_name"])}</div><pre>{cut(arguments)}</pre>')
        out.append(f"<pre>{cut(results.get(call['tool_call_id'], ''))}</pre>")
    return "".join(out)
