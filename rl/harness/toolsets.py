"""The tools that environments choose from, by name."""

from collections.abc import Sequence

from rl.harness.files import FILE_TOOLS, OPTIONAL_FILE_TOOLS
from rl.harness.planning import OPTIONAL_PLANNING_TOOLS, PLANNING_TOOLS
from rl.harness.schema import ToolSet
from rl.harness.search import SEARCH_TOOLS
from rl.harness.terminal import OPTIONAL_TERMINAL_TOOLS, TERMINAL_TOOLS

DEFAULT = (*FILE_TOOLS, *SEARCH_TOOLS, *TERMINAL_TOOLS, *PLANNING_TOOLS)
OPTIONAL = (*OPTIONAL_FILE_TOOLS, *OPTIONAL_TERMINAL_TOOLS, *OPTIONAL_PLANNING_TOOLS)  # an environment asks for them by name
ALL = (*DEFAULT, *OPTIONAL)
# Calls of these change nothing: those of one reply may run at the same time.
READERS = frozenset(
    {"read_file", "list_dir", "glob", "grep", "codebase_search", "read_lints", "shell_output", "web_search", "web_fetch"}
)


def tool_set(names: Sequence[str] | None = None, *, strict: bool = True) -> ToolSet:
    """The tools called `names`, or all but the optional ones; KeyError for an unknown name."""
    known = ToolSet(ALL, strict=strict)
    return known.subset(list(names) if names is not None else [tool.name for tool in DEFAULT])
