"""`python -m rl demo`: `python -m rl train` with the tiny base and the tiny tasks."""

from collections.abc import Sequence

from rl.demo.recipe import RLRecipe
from rl.train import command


def main(argv: Sequence[str]) -> int:
    """The command. Returns the process's exit status."""
    return command("demo", "a tiny coding agent that learns from tests, in sandboxes", argv, RLRecipe().run_config)
