"""What was done in a sandbox, so that another can be brought to where it was: snapshots keep files, a journal keeps the rest.

Processes are not in a snapshot. After a loss, `resume` makes a sandbox from the last snapshot and runs again what came after it,
and of what came before the commands that were marked as leaving something running (`background=True`). A command whose exit
status is another one than then is told: the trajectory does not go on as if nothing had happened.
"""

import base64
import json
from dataclasses import replace
from pathlib import Path

from rl.environments.sandbox import ExecResult, Sandbox, SandboxBackend, Snapshot, SnapshotError


class Journal:
    """Records verbs of `sandbox` into a file, a line each, written before the result is handed on."""

    def __init__(self, sandbox: Sandbox, path: Path):
        self.sandbox, self.path, self.snapshot_taken = sandbox, Path(path), None
        self.path.touch()

    def exec(self, command, *, background: bool = False, **options) -> ExecResult:
        result = self.sandbox.exec(command, **options)
        options = options | ({"stdin": base64.b64encode(options["stdin"]).decode()} if "stdin" in options else {})
        self._add({"verb": "exec", "command": command, "options": options, "exit": result.exit_code, "background": background})
        return result

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.sandbox.write(path, data, mode=mode)
        self._add({"verb": "write", "path": path, "data": base64.b64encode(data).decode(), "mode": mode})

    def snapshot(self) -> Snapshot:
        self.snapshot_taken = self.sandbox.snapshot()
        self._add({"verb": "snapshot", "id": self.snapshot_taken.id})
        return self.snapshot_taken

    def resume(self, backend: SandboxBackend) -> Sandbox:
        """A new sandbox where this one was; SnapshotError when a command ends differently than it did."""
        spec = self.sandbox.spec if self.snapshot_taken is None else replace(self.sandbox.spec, image=self.snapshot_taken)
        entries = [json.loads(line) for line in self.path.read_text().splitlines()]
        last = max((i for i, entry in enumerate(entries) if entry["verb"] == "snapshot"), default=-1)
        sandbox = backend.create(spec)
        try:
            for i, entry in enumerate(entries):
                if i > last or entry.get("background"):
                    _replay(sandbox, entry)
        except BaseException:
            sandbox.destroy()
            raise
        self.sandbox = sandbox
        return sandbox

    def _add(self, entry: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _replay(sandbox: Sandbox, entry: dict) -> None:
    if entry["verb"] == "write":
        sandbox.write(entry["path"], base64.b64decode(entry["data"]), mode=entry["mode"])
    elif entry["verb"] == "exec":
        options = entry["options"]
        if "stdin" in options:
            options = options | {"stdin": base64.b64decode(options["stdin"])}
        code = sandbox.exec(entry["command"], **options).exit_code
        if code != entry["exit"]:
            raise SnapshotError(f"replayed, {entry['command']!r} ended with {code}, and with {entry['exit']} before")
