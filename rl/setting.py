"""What a run's configuration names: the base, the prompts, the held-out tasks, the dialect and the tools."""

from collections.abc import Callable
from pathlib import Path

from rl.config import RunConfig
from rl.demo.base import make_base
from rl.demo.recipe import BaseRecipe
from rl.harness.dialect import TERSE, ChatDialect, Dialect, TerseDialect
from rl.harness.schema import ToolSet
from rl.harness.toolsets import tool_set
from rl.prompts import Family, Prompts, TaskDirectory
from rl.tasks import tiny
from rl.tasks.task import Task, load
from training.base import find_base
from training.data.tokenizer import load_vocabulary

Progress = Callable[[str, int, int, float], None]


def setting(config: RunConfig, on_progress: Progress) -> tuple[Path, Prompts, list[Task], Dialect, ToolSet]:
    """(base, prompts, held-out tasks, dialect, tools). Makes the tiny base where none is named and none is kept, and tells
    `on_progress` (what, steps, of how many, loss).

    A directory of tasks has its held-out ones in `heldout/`, the others beside it. Raises FileNotFoundError, TaskError or
    ValueError for what is not there.
    """
    prompts, heldout = tiny_tasks(config) if config.tasks == "tiny" else own_tasks(Path(config.tasks))
    path = Path(config.base) if config.base else make_base(config.cache_dir, on_progress=on_progress)
    found = find_base(path)
    if found.tokenizer is None:
        raise FileNotFoundError(f"{path} has no tokenizer")
    vocabulary = load_vocabulary(found.tokenizer)
    if config.dialect == "terse":
        return path, prompts, heldout, TerseDialect(vocabulary), tool_set(list(TERSE.values()))
    return path, prompts, heldout, ChatDialect(vocabulary), tool_set()


def tiny_tasks(config: RunConfig) -> tuple[Prompts, list[Task]]:
    """The tiny family of the demo's difficulties and kinds, by seeds from 0 on; its held-out split shares none of its names."""
    recipe = BaseRecipe()
    levels, kinds = recipe.difficulties, recipe.kinds
    count = max(config.heldout_tasks, config.eval_tasks if config.eval_every else 0)
    heldout = [tiny.instance(seed, "heldout", levels[seed % len(levels)], kinds) for seed in range(count)]
    first = config.seed * 1_000_000
    return Family(lambda seed, level: tiny.instance(seed, "train", levels[level], kinds), len(levels), first), heldout


def own_tasks(directory: Path) -> tuple[Prompts, list[Task]]:
    return TaskDirectory(directory), [load(file.parent) for file in sorted(directory.glob("heldout/*/task.toml"))]
