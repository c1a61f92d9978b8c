"""Command line: `python -m training demo`, `python -m training run`."""

import argparse
import os
import sys
import warnings

# Both are read when torch is imported or first allocates, so they have to be set before the imports below.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages: first touching logits and gradients is slow in small ones
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's idle threads sleep and leave the cores to mxmoe's

from mxmoe.recipes import RECIPES
from training import demo
from training.base import find_base
from training.config import add_arguments, from_command_line, given


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
    return main


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    changes = given(arguments)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        if arguments.command == "run":
            sizes = find_base(changes["init"]).sizes if changes.get("init") and not arguments.resume else None
            config = from_command_line(arguments, sizes=sizes)
            return demo.run(config, changes, resume=arguments.resume, overwrite=arguments.overwrite)
        config = from_command_line(arguments, demo.DEFAULTS)
        return demo.demo(config, arguments.recipes, arguments.minutes, resume=arguments.resume, overwrite=arguments.overwrite)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; finished checkpoints are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
