"""Command line: `mxmoe info`, also `python -m mxmoe info`."""

import argparse
import os
import sys

import mxmoe
from mxmoe.info import report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mxmoe", description="Low-precision Mixture-of-Experts compute.")
    parser.add_argument("--version", action="version", version=mxmoe.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, CPU, devices, and which backend has which verb in which format")
    parser.parse_args(argv)
    try:
        print(report(), flush=True)
    except BrokenPipeError:  # `mxmoe info | head` has read enough; nothing may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
