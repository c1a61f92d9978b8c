"""A sandbox that is none, for scripted demonstrations: the tools themselves run over a dict of files, some thousand calls a second.

It knows what the tools of the terse dialect ask of a sandbox and nothing else, and runs Python in this very process: for the
expert's code only, which is this package's own. What a model wrote runs in real sandboxes.
"""

import builtins
import errno
import posixpath
import types
from collections.abc import Sequence

from rl.environments.sandbox import ExecResult
from rl.harness.files import WHERE

WORKDIR = "/workspace"


class Rehearsal:
    """files: path inside the work directory -> bytes."""

    def __init__(self, files: dict[str, bytes]):
        self.files = {posixpath.join(WORKDIR, path): data for path, data in files.items()}

    def read(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return self.files[path]

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.files[path] = data

    def exec(self, command: Sequence[str], *, cwd: str, **options) -> ExecResult:
        path = posixpath.normpath(posixpath.join(cwd, command[-1]))
        if tuple(command[:3]) == ("sh", "-c", WHERE):
            mode = "644\n" if path in self.files else ""
            return ExecResult(0, f"{WORKDIR}\n{path}\n{mode}".encode())
        if tuple(command[:2]) == ("python3", "-B"):
            if path not in self.files:
                return ExecResult(2, b"", f"python3: can't open file '{path}': [Errno 2] No such file or directory\n".encode())
            return ExecResult(0, self.python(path).encode())
        raise NotImplementedError(f"the rehearsal runs no {command[0]}")

    def python(self, path: str) -> str:
        """What a script prints."""
        out: list[str] = []

        def imported(name: str, *_) -> types.ModuleType:
            module = types.ModuleType(name)
            module.__file__ = f"{WORKDIR}/{name}.py"
            if module.__file__ not in self.files:
                raise ModuleNotFoundError(f"No module named {name!r}")
            self.run(module.__file__, vars(module))
            return module

        scope = vars(builtins) | {"__import__": imported, "print": lambda *parts: out.append(" ".join(map(str, parts)) + "\n")}
        self.run(path, {"__builtins__": scope})
        return "".join(out)

    def run(self, path: str, scope: dict) -> None:
        exec(compile(self.files[path], path, "exec"), scope)
