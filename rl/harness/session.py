"""What the tools of one run share: the sandbox, the work directory, and what the agent has said about its work."""

import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rl.environments.sandbox import ExecResult, Sandbox

MAX_TEXT = 30_000  # characters of one result that the model sees


class Web(Protocol):
    """Access to the web, by whoever may give it: the environment's egress policy stands behind it."""

    def search(self, query: str) -> str: ...

    def fetch(self, url: str) -> str: ...


@dataclass
class Session:
    """One agent in one sandbox."""

    sandbox: Sandbox
    workdir: str = "/workspace"
    max_text: int = MAX_TEXT
    ranker: str = "lexical"  # of `codebase_search`
    web: Web | None = None
    ask: Callable[[str], str] | None = None  # the user's answer to a question
    todos: list[dict[str, str]] = field(default_factory=list)
    answer: str | None = None  # set by `finish`
    summary_wanted: bool = False  # set by `summarize`
    jobs: dict[int, str] = field(default_factory=dict)  # background commands by number
    faults: list[str] = field(default_factory=list)  # errors of tools that are none of the model's doing

    def path(self, path: str) -> str:
        """An absolute path inside the sandbox; links in it are followed there, where they lead nowhere else."""
        return posixpath.normpath(posixpath.join(self.workdir, path))

    def argument(self, path: str) -> str:
        """The path as an argument of a command that runs in the work directory."""
        inside = posixpath.relpath(self.path(path), self.workdir)
        return self.path(path) if inside.startswith("..") else posixpath.join(".", inside) if inside != "." else "."

    def run(self, *command: str, **options) -> ExecResult:
        """One command in the work directory, without a shell."""
        return self.sandbox.exec(command, cwd=self.workdir, **options)

    def text(self, text: str, limit: int | None = None) -> str:
        """The text as the model sees it: too long a one loses its middle, whole lines where there are several."""
        limit = limit or self.max_text
        if len(text) <= limit:
            return text
        half = max((limit - 80) // 2, 1)  # the notice counts too
        head, tail = text[:half], text[-half:]
        head = head[: head.rfind("\n") + 1] or head
        tail = tail[tail.find("\n") + 1 :] if "\n" in tail[:-1] else tail
        cut = text[len(head) : len(text) - len(tail)]
        return f"{head}\n[... {len(cut)} characters, {cut.count(chr(10))} line ends cut ...]\n{tail}"
