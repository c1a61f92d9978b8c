"""`python -m rl view RUN`: serves the page of a run."""

import argparse
import sys
from collections.abc import Sequence

PORT = 8460


def main(argv: Sequence[str]) -> int:
    """The command. Returns the process's exit status."""
    parser = argparse.ArgumentParser(
        "python -m rl view", description="browse a run's rollouts on a local page, also while it goes on"
    )
    parser.add_argument("run", help="directory of a run")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s, for this machine only)")
    parser.add_argument("--port", type=int, default=PORT, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--base", default="", help="what the run began with, where its configuration does not lead to it")
    options = parser.parse_args(list(argv))
    if not 0 <= options.port < 1 << 16:
        parser.error(f"--port must be from 0 to 65535, got {options.port}")
    from rl.view.server import Server, Viewer

    try:
        server = Server(Viewer(options.run, options.base), options.host, options.port)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    with server:
        if not server.is_loopback:
            print("everybody who reaches this address can read the run", file=sys.stderr)
        print(f"{options.run}: {server.url} (ends with Ctrl-C)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
