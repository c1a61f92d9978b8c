"""Command line: `mxmoe info`, `mxmoe convert IN OUT --to FORMAT`; also as `python -m mxmoe`."""

import argparse
import os
import sys

import mxmoe
from mxmoe.checkpoint.convert import ROUTED_EXPERTS, convert, progress_line
from mxmoe.checkpoint.encodings import WRITTEN
from mxmoe.info import report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mxmoe", description="Low-precision Mixture-of-Experts compute.")
    parser.add_argument("--version", action="version", version=mxmoe.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, CPU, devices, and which backend has which verb in which format")
    converting = commands.add_parser(
        "convert", help="a Hugging Face checkpoint in another format; resumable, appears when it is whole"
    )
    converting.add_argument(
        "source", metavar="IN", help="directory or file: BF16, DeepSeek FP8, Kimi INT4, gpt-oss MXFP4, MXFP8, NVFP4"
    )
    converting.add_argument("target", metavar="OUT", help="new directory")
    converting.add_argument("--to", required=True, choices=("bf16", *WRITTEN))
    converting.add_argument("--targets", default=ROUTED_EXPERTS, metavar="REGEX", help="weights to encode (default: %(default)s)")
    converting.add_argument("--max-shard-gb", type=float, default=5.0, help="size of a file (default: %(default)s)")
    args = parser.parse_args(argv)
    return show_info() if args.command == "info" else run_convert(args)


def run_convert(args) -> int:
    try:
        if not 0 < args.max_shard_gb < float("inf"):
            raise ValueError(f"--max-shard-gb must be greater than 0 and finite, got {args.max_shard_gb}")
        done = convert(
            args.source,
            args.target,
            args.to,
            targets=args.targets,
            max_shard_bytes=int(args.max_shard_gb * 1e9),
            progress=progress_line(),
        )
    except (OSError, ValueError) as error:
        print(f"mxmoe convert: {error}", file=sys.stderr)
        return 1
    read, written = (f"{count / 1e9:.2f} GB" for count in (done.bytes_read, done.bytes_written))
    print(f"{args.target}: {done.encoded} weights written anew, {read} read, {written} written")
    for name, groups in done.irreproducible.items():
        print(f"{name}: no INT4 scale reproduces {groups} groups of 32; they are rounded")
    return 0


def show_info() -> int:
    try:
        print(report(), flush=True)
    except BrokenPipeError:  # `mxmoe info | head` has read enough; nothing may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
