"""`python -m rl agent --model URL --task DIR "request"`: an agent works on a copy of a directory of yours, in a sandbox.

What it does is shown as it happens, what it changed as a diff at the end. Nothing of yours changes unless `--apply` writes that
back. A line that you type while it works is shown to it before its next reply; Ctrl-C ends the work after the call under way.
"""

import argparse
import io
import json
import os
import queue
import signal
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from rl.environments import open_backend
from rl.environments.images import BASIC, ImageStore, Recipe
from rl.environments.sandbox import CannotIsolate, Limits, Sandbox, SandboxError, SandboxSpec
from rl.harness.loop import LoopLimits, run
from rl.harness.model import ChatServer, CompletionServer, Model, ModelError, ScriptedModel, served_name
from rl.harness.session import Session
from rl.harness.toolsets import DEFAULT, tool_set
from rl.harness.trajectory import Step, Trajectory, replies_of
from rl.harness.web import SandboxWeb
from rl.tasks.workspace import LEFTOVERS, MAX_TREE, Entry, Tree, WorkLost, difference, tree

WORKDIR = "/workspace"
IMAGE = Recipe(programs=(*BASIC, "git"), python=True)
SHOWN = 6  # lines of a result
COMMIT = """command -v git > /dev/null || exit 0
git init -q . && git add -A -f && git -c user.name=user -c user.email=user@localhost commit -q --allow-empty -m base"""
NO_SANDBOX = """This machine cannot keep an agent in a sandbox: {error}
Sandboxes need Linux 5.12 or newer and root. Run the command as root (sudo), in a virtual machine or in a privileged container."""


def files_of(directory: Path) -> Tree:
    """What an agent gets of a directory: what git would keep, or all but repositories and what tools leave behind.

    Raises ValueError for a directory that is none or too large.
    """
    if not directory.is_dir():
        raise ValueError(f"--task: expected a directory, got {directory}")
    command = ["git", "-C", str(directory), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True)
    if listed.returncode == 0:
        names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
    else:
        names = set()
        for top, directories, found in os.walk(directory):
            inside = Path(top).relative_to(directory)
            links = [name for name in directories if (Path(top) / name).is_symlink()]
            directories[:] = [name for name in directories if name not in (".git", *LEFTOVERS, *links)]
            names |= {str(inside / name) for name in (*found, *links)}
    entries: Tree = {}
    size = 0
    for name in sorted(names):
        path = directory / name
        if path.is_symlink():
            entries[name] = Entry(0o120000, os.fsencode(os.readlink(path)))
        elif path.is_file():
            mode = path.stat().st_mode
            size += path.stat().st_size
            if size > MAX_TREE:
                raise ValueError(
                    f"--task: {directory} has more than {MAX_TREE >> 20} MiB of files; name what is to be left in .gitignore"
                )
            entries[name] = Entry(0o100755 if mode & stat.S_IXUSR else 0o100644, path.read_bytes())
    return entries


def put(sandbox: Sandbox, entries: Tree) -> None:
    """Writes the files into the sandbox's work directory, as one commit."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, entry in entries.items():
            member = tarfile.TarInfo(name)
            if entry.mode == 0o120000:
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(entry.data)
                archive.addfile(member)
            else:
                member.size, member.mode = len(entry.data), entry.mode & 0o777
                archive.addfile(member, io.BytesIO(entry.data))
    script = f"mkdir -p {WORKDIR} && cd {WORKDIR} && tar -xpf - && {{ {COMMIT}; }}"
    done = sandbox.exec(["sh", "-c", script], stdin=stream.getvalue(), timeout_s=120)
    if not done.ok:
        raise SandboxError(f"the files could not be put into the sandbox: {done.text[-300:]}")


def write_back(directory: Path, patch: str) -> None:
    """Applies the diff to the directory: all of it or none. git lets no path or link of it lead elsewhere. Raises ValueError."""
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(directory.resolve().parent)}
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    data = patch.encode("utf-8", "surrogateescape")
    done = subprocess.run(command, cwd=directory, input=data, env=environment, capture_output=True)
    if done.returncode:
        raise ValueError(f"nothing was written: {done.stderr.decode(errors='replace').strip()}")


class Progress:
    """Shows a run as it happens."""

    def __init__(self, console: Console):
        self.console, self.streamed = console, False

    def piece(self, text: str) -> None:
        self.streamed = True
        self.console.print(text, end="", markup=False, highlight=False)

    def step(self, step: Step) -> None:
        if step.source != "agent":
            return
        if self.streamed:
            self.console.print()
        elif step.reply.text:
            self.console.print(step.reply.text, markup=False)
        self.streamed = False
        for call, result in zip(step.reply.calls, step.results, strict=False):
            self.console.print(Text(f"> {call.name} {call.arguments[:200]}", "cyan"))
            lines = result.text.splitlines()
            more = [f"({len(lines) - SHOWN} more lines)"] if len(lines) > SHOWN else []
            style = "dim" if result.kind == "ok" else "red"
            self.console.print(Text("\n".join(f"  {line[:200]}" for line in [*lines[:SHOWN], *more]), style))


@contextmanager
def attention(listens: bool):
    """(what the user has typed since the last time, whether the user has pressed Ctrl-C) while a run goes on."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    stopped = threading.Event()

    def listen():
        for line in sys.stdin:
            if line.strip():
                said.put(line.strip())

    def interrupted(*_):
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    if listens:
        threading.Thread(target=listen, daemon=True).start()
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupted) if main else None
    try:
        yield lambda: [said.get() for _ in range(said.qsize())], stopped.is_set
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


def model_of(arguments: argparse.Namespace, progress: Progress) -> Model:
    if arguments.scripted:
        return ScriptedModel(replies_of(json.loads(Path(arguments.scripted).read_text("utf-8"))))
    key = os.environ.get("OPENAI_API_KEY", "")
    kind = CompletionServer if arguments.completions else ChatServer
    name = arguments.name or served_name(arguments.model, key)
    return kind(arguments.model, name, key=key, on_text=progress.piece)


def work(arguments: argparse.Namespace, model: Model, progress: Progress) -> tuple[Trajectory, str]:
    """(the run, its diff). Raises SandboxError, WorkLost, and ValueError for a directory that cannot be used."""
    entries = files_of(arguments.task)
    limits = LoopLimits(arguments.turns, arguments.seconds, context_tokens=arguments.context_tokens)
    names = [tool.name for tool in DEFAULT] + (["web_search", "web_fetch"] if arguments.web else [])
    images = ImageStore(arguments.cache / "images", lambda: open_backend("namespaces"))
    spec = SandboxSpec(
        arguments.image or images.build(IMAGE), Limits(memory_bytes=arguments.memory_mb << 20), lease_s=arguments.seconds + 600
    )
    with open_backend("namespaces") as backend, backend.create(spec) as sandbox:
        put(sandbox, entries)
        before = tree(sandbox, WORKDIR)
        session = Session(sandbox, WORKDIR, web=SandboxWeb(sandbox, arguments.search_url) if arguments.web else None)
        with attention(sys.stdin is not None and sys.stdin.isatty()) as (inbox, stopped):
            done = run(
                model,
                session,
                tool_set(names, strict=False),
                arguments.request,
                limits,
                inbox=inbox,
                stopped=stopped,
                on_step=progress.step,
            )
        if session.answer:
            progress.console.print(session.answer, markup=False)
        return done, difference(before, tree(sandbox, WORKDIR))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m rl agent", description=__doc__.split("\n\n", 1)[1], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("request", help="what is to be done")
    made.add_argument("--task", type=Path, required=True, metavar="DIR", help="the directory to work on")
    which = made.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="URL", help="an OpenAI-compatible server, up to /v1; its key in OPENAI_API_KEY")
    which.add_argument("--scripted", metavar="FILE", help="replay the replies of a trajectory instead of asking a model")
    made.add_argument("--name", help="of the model; the server's first if not given")
    made.add_argument(
        "--completions", action="store_true", help="use /completions, with a prompt of our own, not /chat/completions"
    )
    made.add_argument("--apply", action="store_true", help="write the changes to DIR")
    made.add_argument("--save", type=Path, metavar="FILE", help="write the trajectory (ATIF JSON)")
    made.add_argument(
        "--image", type=Path, metavar="ROOT", help="root file system of the sandbox; else this machine's Python and git"
    )
    made.add_argument("--turns", type=int, default=100, help="replies at most")
    made.add_argument("--seconds", type=float, default=1800.0, help="the work's deadline")
    made.add_argument("--memory-mb", type=int, default=2048, help="of the sandbox")
    made.add_argument("--context-tokens", type=int, default=0, help="a longer prompt is summarized; 0: never")
    made.add_argument(
        "--web", action="store_true", help="offer web tools, which work as far as the sandbox's network policy lets them"
    )
    made.add_argument("--search-url", default="", help="of a search engine, with {query}, for web_search")
    made.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "mxmoe", help="where images are kept")
    return made


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    console = Console()
    progress = Progress(console)
    try:
        done, patch = work(arguments, model_of(arguments, progress), progress)
    except CannotIsolate as error:
        print(NO_SANDBOX.format(error=error), file=sys.stderr)
        return 3
    except (SandboxError, WorkLost, ModelError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.save:
        done.save(arguments.save)
    console.print(
        f"\n{done.end}{f': {done.error}' if done.error else ''}; {len(done.replies)} replies, {len(done.calls)} calls, "
        f"{done.completion_tokens} tokens",
        markup=False,
    )
    console.print(Syntax(patch, "diff", background_color="default") if patch else "No file was changed.")
    if patch and arguments.apply:
        try:
            write_back(arguments.task, patch)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        console.print(f"Written to {arguments.task}", markup=False)
    elif patch:
        console.print("Nothing was written; --apply writes it back.")
    return 1 if done.end in ("model_error", "sandbox_error") else 0
