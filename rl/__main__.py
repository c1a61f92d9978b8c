"""The command line: `python -m rl COMMAND ...`.

Each command is a module with `main(argv) -> exit status`, loaded when it is called.
"""

import importlib
import sys

COMMANDS = {
    "agent": ("rl.agent", "let an agent work on a directory"),
    "anyrun": ("rl.environments.anyrun.cli", "serve sandboxes on this machine and others"),
    "demo": ("rl.demo.command", "a tiny coding agent that learns from tests, in sandboxes, on this machine"),
    "eval": ("rl.evals.command", "run a suite of tasks; report and compare runs"),
    "tasks": ("rl.tasks.command", "make, check and list tasks"),
    "train": ("rl.train", "the asynchronous loop: from a base and tasks to weights that do better"),
    "view": ("rl.view.command", "browse a run's rollouts, token by token, on a local page"),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in COMMANDS:
        print(__doc__.splitlines()[0].replace("`", ""), *(f"  {name:8} {about}" for name, (_, about) in COMMANDS.items()), sep="\n")
        return 0 if argv in (["-h"], ["--help"]) else 2
    return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
