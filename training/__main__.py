"""Command line: `python -m training demo | run | evaluate | select | report`."""

import argparse
import os
import sys
import warnings
from dataclasses import fields
from pathlib import Path

# Both are read when torch is imported or first allocates, so they have to be set before the imports below.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages: first touching logits and gradients is slow in small ones
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's idle threads sleep and leave the cores to mxmoe's

from mxmoe.recipes import RECIPES
from training import demo
from training.base import find_base
from training.config import add_arguments, field_help, from_command_line, given
from training.evaluate import table as evaluation
from training.page import write_page


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(prog="python -m training", description="Train a small MoE model on Python source.")
    commands = main.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run", help="train by one recipe")
    demo_parser = commands.add_parser("demo", help="train by several recipes from the same seed and compare them")
    add_arguments(run_parser)
    add_arguments(demo_parser, without=("recipe",), defaults=demo.DEFAULTS)
    demo_parser.add_argument(
        "--recipes", nargs="+", choices=tuple(RECIPES), default=list(demo.RECIPES), help="default: %(default)s"
    )
    demo_parser.add_argument("--minutes", type=float, help="choose --steps so that all recipes together train this long")
    for command in (run_parser, demo_parser):
        group = command.add_mutually_exclusive_group()
        group.add_argument("--resume", action="store_true", help="continue the run in --run-dir from its newest checkpoint")
        group.add_argument("--overwrite", action="store_true", help="replace the run in --run-dir")
    for name, number, text in (("evaluate", "+", "evaluate models"), ("select", "+", "evaluate models and choose a base")):
        command = commands.add_parser(name, help=text)
        command.add_argument("paths", nargs=number, metavar="CKPT", help="run, checkpoint, or Hugging Face directory")
        command.add_argument("--recipe", choices=tuple(RECIPES), help="of the experts; default: the one it was trained with")
        command.add_argument("--window", type=int, help="most tokens read at once; default: the longest it was trained on")
        command.add_argument("--out", metavar="FILE", help="JSON file for the numbers")
        for f in fields(evaluation.Effort):
            text = f"{field_help(evaluation.Effort)[f.name]} (default: {f.default!r})"
            command.add_argument("--" + f.name, type=f.type, default=f.default, help=text)
    report = commands.add_parser("report", help="one self-contained HTML page of runs")
    report.add_argument("paths", nargs="+", type=Path, metavar="RUN", help="run directories, or one that holds runs")
    report.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the first directory")
    return main


def dispatch(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the process's exit status."""
    if arguments.command in ("evaluate", "select"):
        effort = evaluation.Effort(**{f.name: getattr(arguments, f.name) for f in fields(evaluation.Effort)})
        choose = arguments.command == "select"
        return evaluation.main(arguments.paths, effort, arguments.recipe, arguments.window, choose, arguments.out)
    if arguments.command == "report":
        print(write_page(arguments.paths, arguments.out or arguments.paths[0] / "report.html"))
        return 0
    changes = given(arguments)
    if arguments.command == "run":
        sizes = find_base(changes["init"]).sizes if changes.get("init") and not arguments.resume else None
        config = from_command_line(arguments, sizes=sizes)
        return demo.run(config, changes, resume=arguments.resume, overwrite=arguments.overwrite)
    config = from_command_line(arguments, demo.DEFAULTS)
    return demo.demo(config, arguments.recipes, arguments.minutes, resume=arguments.resume, overwrite=arguments.overwrite)


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        return dispatch(arguments)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; finished checkpoints are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
