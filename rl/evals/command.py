"""`python -m rl eval --model URL --suite NAME`: runs a suite; `python -m rl eval report RUN...`: the page of runs, compared."""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from rl.agent import NO_SANDBOX
from rl.environments.sandbox import CannotIsolate, SandboxError
from rl.evals.page import page
from rl.evals.runner import Evaluation, Price, Result, Settings
from rl.evals.suites import TARGETED, suite
from rl.evals.summary import HEADS, Summary, cells, differs, summarize
from rl.harness.loop import LoopLimits
from rl.harness.model import ChatServer, CompletionServer, ModelError, served_name
from rl.harness.toolsets import tool_set
from rl.tasks.task import TaskError
from rl.tasks.workspace import open_sandboxes


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m rl eval", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument(
        "--model", metavar="URL", required=True, help="an OpenAI-compatible server, up to /v1; its key in OPENAI_API_KEY"
    )
    made.add_argument("--suite", required=True, help=f"bench, tiny, {', '.join(TARGETED)}, or a directory of tasks")
    made.add_argument("--name", help="of the model; the server's first if not given")
    made.add_argument("--version", default="", help="of its weights: stands beside the numbers")
    made.add_argument("--completions", action="store_true", help="use /completions, not /chat/completions")
    made.add_argument("--passes", type=int, default=1, help="attempts at every task")
    made.add_argument("--parallel", type=int, default=2, help="attempts at the same time")
    made.add_argument("--limit", type=int, help="only so many tasks")
    made.add_argument("--temperature", type=float)
    made.add_argument("--seed", type=int, help="sent with every request, one more for each pass")
    made.add_argument("--turns", type=int, default=100)
    made.add_argument("--reply-tokens", type=int, default=4096)
    made.add_argument("--context-tokens", type=int, default=0)
    made.add_argument("--prices", type=Path, help='JSON: {"model": [dollars per million prompt tokens, completion tokens]}')
    made.add_argument("--out", type=Path, help="directory of the run; one that is there goes on. Default: runs/evals/SUITE-MODEL")
    made.add_argument("--directory", type=Path, default=Path("runs/tasks"), help="keeps images and built tasks")
    return made


def report_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m rl eval report", description="A table and one HTML page of runs, compared.")
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    made.add_argument("--out", type=Path, default=Path("report.html"))
    return made


def main(argv: Sequence[str]) -> int:
    try:
        if argv[:1] == ["report"]:
            arguments = report_parser().parse_args(argv[1:])
            return report(arguments.runs, arguments.out)
        return evaluate(parser().parse_args(argv))
    except CannotIsolate as error:
        print(NO_SANDBOX.format(error=error), file=sys.stderr)
        return 3
    except (TaskError, SandboxError, ModelError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def evaluate(arguments: argparse.Namespace) -> int:
    for name in ("passes", "parallel", "limit", "turns", "reply_tokens"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if arguments.context_tokens < 0:
        raise ValueError(f"--context-tokens must be at least 0, got {arguments.context_tokens}")
    if arguments.temperature is not None and not 0 <= arguments.temperature < math.inf:
        raise ValueError(f"--temperature must be a number of at least 0, got {arguments.temperature}")
    key = os.environ.get("OPENAI_API_KEY", "")
    name = arguments.name or served_name(arguments.model, key)
    options = {k: v for k in ("temperature", "seed") if (v := getattr(arguments, k)) is not None}
    limits = LoopLimits(arguments.turns, reply_tokens=arguments.reply_tokens, context_tokens=arguments.context_tokens)
    price = price_of(arguments.prices, name) if arguments.prices else None
    settings = Settings(arguments.suite, name, arguments.version, arguments.passes, limits, price, options)
    out = arguments.out or Path("runs/evals") / re.sub(r"[^\w.-]+", "-", f"{arguments.suite}-{name}-{arguments.version}").strip("-")
    kind = CompletionServer if arguments.completions else ChatServer

    def model_of(task: str, attempt: int):
        seeded = options | ({"seed": options["seed"] + attempt} if "seed" in options else {})
        return kind(arguments.model, name, key=key, **seeded)

    with open_sandboxes(arguments.directory) as sandboxes:
        entries = suite(arguments.suite, sandboxes, arguments.directory, arguments.limit)
        evaluation = Evaluation(out, settings, entries, tool_set(strict=False))
        missing = len(evaluation.missing())
        with Progress(console=Console(stderr=True)) as progress:
            bar = progress.add_task(escape(arguments.suite), total=missing)

            def told(result: Result) -> None:
                score = "no score" if result.score is None else f"{100 * result.score:.0f} %"
                progress.console.print(
                    f"{result.task} {result.attempt + 1}: {score} {result.status} {result.reason[:80]}", markup=False
                )
                progress.advance(bar)

            evaluation.run(model_of, sandboxes, arguments.parallel, told)
    return report([out], out / "report.html")


def price_of(file: Path, name: str) -> Price:
    prices = json.loads(file.read_text())
    if not isinstance(prices, dict) or name not in prices:
        raise ValueError(f"{file}: expected a price of {name!r}, got those of {', '.join(prices) if prices else 'none'}")
    price = prices[name]
    if not isinstance(price, list) or len(price) != 2 or not all(type(p) in (int, float) and 0 <= p < math.inf for p in price):
        raise ValueError(f"{file}: {name}: expected [dollars per million prompt tokens, completion tokens], got {price!r}")
    return Price(*price)


def report(runs: Sequence[Path], out: Path) -> int:
    summaries = [summarize(run) for run in runs]
    out.write_bytes(page(summaries).encode("utf-8", "replace"))
    show(summaries, Console())
    print(f"{out} has the attempts")
    return 1 if any(s.average is None for s in summaries) else 0


def show(summaries: Sequence[Summary], console: Console) -> None:
    table = Table(*HEADS)
    for summary in summaries:
        table.add_row(*map(escape, cells(summary)))
    console.print(table)
    for i, first in enumerate(summaries):
        for second in summaries[i + 1 :]:
            if found := differs(first, second):
                console.print(
                    f"{second.name} less {first.name}: {100 * found.difference:+.1f} % ({100 * found.low:+.1f} to "
                    f"{100 * found.high:+.1f}), p = {found.p_value:.3g}, {'' if found.significant else 'not '}significant",
                    markup=False,
                )
