"""A shell that remembers: each command is a process of its own, with its own deadline, and hands on its directory and variables.

So nothing that a command does (exit, a hung program, an open quote) can end or block the session, as it could a shell that reads
from a pipe; and no text is added to the command, which a trailing comment or a here-document would swallow.
"""

import secrets

from rl.environments.sandbox import ExecResult, Sandbox

SCRIPT = r"""
if [ -f "$2.env" ]; then . "$2.env"; fi
if [ -f "$2.pwd" ]; then cd "$(cat "$2.pwd")"; fi
trap 'export -p > "$2.env"; pwd > "$2.pwd"' EXIT
eval "$1"
"""


class Session:
    """`run` as Sandbox.exec, of one line or script for `shell`."""

    def __init__(self, sandbox: Sandbox, shell: str = "sh"):
        self.sandbox, self.shell = sandbox, shell
        self.state = f"/tmp/.session-{secrets.token_hex(4)}"

    def run(self, command: str, **options) -> ExecResult:
        return self.sandbox.exec([self.shell, "-c", SCRIPT, self.shell, command, self.state], **options)
