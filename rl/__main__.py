"""`python -m rl COMMAND ...`: each part's own command line."""

import importlib
import sys

COMMANDS = {"anyrun": "rl.environments.anyrun.cli"}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m rl {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
