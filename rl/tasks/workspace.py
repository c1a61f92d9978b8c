"""Where tasks run: a work directory in a fresh sandbox, and what an agent changed of it.

    with Sandboxes(backend, images) as sandboxes:
        sandbox = sandboxes.start(task)  # the agent's: base files, one commit, no tests
        patch = sandboxes.changes(task, sandbox)

A task's first start makes its base, a snapshot: image, then `environment/workspace/` in the work directory, caches and histories
removed, everything in one commit of a new repository. All starts are forks of that.
"""

import io
import itertools
import os
import stat
import subprocess
import tarfile
import tempfile
import threading
import tomllib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rl.environments import open_backend
from rl.environments.dockerfile import parse_dockerfile
from rl.environments.images import BASIC, ImageStore, Recipe
from rl.environments.sandbox import Limits, Sandbox, SandboxBackend, SandboxSpec, Snapshot, SnapshotError
from rl.tasks.task import Task, TaskError

WORKSPACE = "environment/workspace/"
MAX_TREE = 256 << 20  # bytes of a work directory
MAX_PATH, MAX_NAME = 3800, 255  # bytes, below Linux's limits: a path stands below a directory here
MAX_BASES = 64  # kept by one `Sandboxes`
# Not part of a change: what tools leave behind.
LEFTOVERS = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox")
IN_IMAGE = {"machine": Recipe(programs=BASIC, python=True), "git": Recipe(programs=(*BASIC, "git"), python=True)}
PREPARE = r"""
set -e
umask 022; mkdir -p "$1"; cd "$1"; tar -xpf -
find . \( -name .git -o -name '*.pyc' LEFTOVERS \) -prune -exec rm -rf {} +
command -v git > /dev/null || exit 0
export GIT_AUTHOR_DATE='2000-01-01T00:00:00Z' GIT_COMMITTER_DATE='2000-01-01T00:00:00Z' GIT_CONFIG_NOSYSTEM=1
g() { git -c core.logAllRefUpdates=false -c user.name=user -c user.email=user@localhost -c commit.gpgSign=false "$@"; }
g -c init.defaultBranch=main init -q . 2> /dev/null; g add -A -f; g commit -q --allow-empty --no-verify -m base; echo committed
""".replace("LEFTOVERS", " ".join(f"-o -name {name}" for name in LEFTOVERS))
ARCHIVE = "/tmp/.tree.tar"


@dataclass(frozen=True)
class Entry:
    """A file, or a link with its target as data."""

    mode: int  # git's: 0o100644, 0o100755, 0o120000
    data: bytes


Tree = dict[str, Entry]  # by path inside the work directory


@dataclass(frozen=True)
class Base:
    snapshot: Snapshot
    tree: Tree
    has_git: bool
    env: Mapping[str, str]  # of the image


class WorkLost(Exception):
    """The work directory cannot be read, by the agent's own doing: there is no change to grade."""


def recipe_of(task: Task) -> tuple[Recipe, dict[str, str]]:
    """The image's recipe and its environment.

    From environment/recipe.toml (`base = "machine"`, "git" or absent, and Recipe's fields), or environment/Dockerfile.
    """
    if text := task.files.get("environment/recipe.toml"):
        try:
            fields = tomllib.loads(text.decode())
            base = vars(IN_IMAGE[fields.pop("base")] if "base" in fields else Recipe())
            return Recipe(**(base | {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()})), {}
        except (ValueError, KeyError, TypeError) as error:
            raise TaskError(f"{task.name}: environment/recipe.toml: {type(error).__name__}: {error}") from None
    if text := task.files.get("environment/Dockerfile"):
        with tempfile.TemporaryDirectory() as context:
            for path, data in task.files.items():
                if path.startswith("environment/"):
                    place = Path(context, path.removeprefix("environment/"))
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(data)
            return parse_dockerfile(text.decode(), Path(context))[:2]
    raise TaskError(f"{task.name}: expected environment/recipe.toml or environment/Dockerfile; there is no image hub")


class Sandboxes:
    """Makes sandboxes of tasks on one backend; thread-safe. `roots`: images by the name that tasks give (`Environment.image`)."""

    def __init__(self, backend: SandboxBackend, images: ImageStore, roots: Mapping[str, Path | Snapshot] | None = None):
        self.backend, self.images, self.roots = backend, images, dict(roots or {})
        self._bases: OrderedDict[str, Base] = OrderedDict()
        self._recipes: dict[str, Path] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def root(self, task: Task) -> tuple[Path | Snapshot, Mapping[str, str]]:
        """The image's directory and its environment; TaskError where the task does not say how it is made."""
        if task.environment.image:
            if task.environment.image not in self.roots:
                raise TaskError(f"{task.name}: no image {task.environment.image!r} is here; there is no image hub")
            return self.roots[task.environment.image], {}
        recipe, env = recipe_of(task)
        key = repr(recipe)
        if key not in self._recipes:
            self._recipes[key] = self.images.build(recipe)
        return self._recipes[key], env

    def base(self, task: Task) -> Base:
        """The task's prepared work directory."""
        with self._lock:
            lock = self._locks.setdefault(task.digest, threading.Lock())
        with lock:
            if task.digest not in self._bases:
                made = self._prepare(task)
                with self._lock:
                    self._bases[task.digest] = made
                    if len(self._bases) > MAX_BASES:
                        self._forget(next(iter(self._bases)))
            with self._lock:
                if base := self._bases.get(task.digest):
                    self._bases.move_to_end(task.digest)
                    return base
        return self.base(task)  # forgotten meanwhile

    def _forget(self, digest: str) -> None:
        self._bases.pop(digest).snapshot.drop()
        self._locks.pop(digest, None)

    def start(self, task: Task, lease_s: float = 3600.0) -> Sandbox:
        """A fresh sandbox with the task's base in its work directory: no tests, no solution."""
        for _ in range(3):
            try:
                base = self.base(task)
                return self.backend.create(self._spec(task, base.snapshot, base.env, lease_s))
            except SnapshotError:  # forgotten between the two
                continue
        raise SnapshotError(f"{task.name}: its base is forgotten as soon as it is made")

    def changes(self, task: Task, sandbox: Sandbox) -> str:
        """What an agent changed in its sandbox, as a patch; WorkLost where it made its work directory unreadable."""
        return difference(self.base(task).tree, tree(sandbox, task.environment.workdir))

    def _spec(self, task: Task, image: Path | Snapshot, env: Mapping[str, str], lease_s: float = 600.0) -> SandboxSpec:
        e = task.environment
        limits = Limits(
            memory_bytes=(e.memory_mb or 1024) << 20,
            disk_bytes=(e.storage_mb or 512) << 20,
            cpus=e.cpus or 1.0,
        )
        return SandboxSpec(image, limits, env={**env, **e.env}, lease_s=lease_s)

    def _prepare(self, task: Task) -> Base:
        workdir = task.environment.workdir
        files = {path.removeprefix(WORKSPACE): data for path, data in task.files.items() if path.startswith(WORKSPACE)}
        root, env = self.root(task)
        with self.backend.create(self._spec(task, root, env)) as sandbox:
            command = ["sh", "-c", PREPARE, "sh", workdir]
            done = sandbox.exec(command, stdin=packed(files), timeout_s=task.environment.build_timeout_sec)
            if not done.ok:
                raise TaskError(f"{task.name}: preparing {workdir} ended with {done.exit_code}: {done.text[-500:]}")
            has_git = done.stdout.endswith(b"committed\n")
            if setup := task.files.get("environment/setup.sh"):
                done = sandbox.exec(["sh", "-c", setup.decode()], cwd=workdir, timeout_s=task.environment.build_timeout_sec)
                if not done.ok:
                    raise TaskError(f"{task.name}: environment/setup.sh ended with {done.exit_code}: {done.text[-500:]}")
            found = tree(sandbox, workdir)
            return Base(sandbox.snapshot(), found, has_git, env)

    def close(self) -> None:
        with self._lock:
            for digest in list(self._bases):
                self._forget(digest)

    def __enter__(self) -> "Sandboxes":
        return self

    def __exit__(self, *_) -> None:
        self.close()


@contextmanager
def open_sandboxes(directory: str | Path, backend: str = "namespaces") -> Iterator[Sandboxes]:
    """Sandboxes with a backend of their own; images are kept in `directory`."""
    images = ImageStore(Path(directory) / "images", lambda: open_backend(backend))
    with open_backend(backend) as opened, Sandboxes(opened, images) as sandboxes:
        yield sandboxes


def packed(files: Mapping[str, bytes]) -> bytes:
    """Files as a tar, shell scripts executable, owned by root."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755 if data.startswith(b"#!") else 0o644
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def tree(sandbox: Sandbox, workdir: str) -> Tree:
    """The files and links of a work directory, without repositories and what tools leave. WorkLost if it cannot be read.

    What is neither is left out. Nested repositories are files like any other: their changes are not lost. The archive is made by
    the agent's machine, whose tar may be the agent's: one that no directory could have given is not read.
    """
    excluded = [f"--exclude={name}" for name in (".git", "*.pyc", *LEFTOVERS)]
    done = sandbox.exec(["tar", "-cf", ARCHIVE, *excluded, "-C", workdir, "."], timeout_s=60)
    if not done.ok:
        raise WorkLost(f"reading {workdir} ended with {done.exit_code}: {done.text[-300:]}")
    entries: Tree = {}
    try:
        data = sandbox.read(ARCHIVE, max_bytes=MAX_TREE)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                path = os.path.normpath(member.name)
                if path.startswith(("/", "../")) or path == ".." or ".git" in path.split("/"):
                    continue
                if member.issym():
                    entries[path] = Entry(0o120000, os.fsencode(member.linkname))
                elif member.isreg():
                    mode = 0o100755 if member.mode & stat.S_IXUSR else 0o100644
                    entries[path] = Entry(mode, archive.extractfile(member).read())
                elif member.islnk() and (same := entries.get(os.path.normpath(member.linkname))):
                    entries[path] = same
    except (OSError, tarfile.TarError, UnicodeError, EOFError) as error:
        raise WorkLost(f"reading {workdir}: {type(error).__name__}: {error}") from None
    if odd := misplaced(entries):
        raise WorkLost(f"reading {workdir}: expected files in directories, got {odd[:100]!r}")
    return entries


def misplaced(entries: Tree) -> str | None:
    """An entry that cannot be written out here: below a file or a link, through which it would leave the directory, or with a
    name or a target that is none or too long."""
    for path, entry in entries.items():
        parts, name = path.split("/"), os.fsencode(path)
        above = itertools.accumulate(parts[:-1], "{}/{}".format)
        target = entry.data if entry.mode == 0o120000 else b"."
        if path == "." or b"\0" in name + target or len(name) > MAX_PATH or not 0 < len(target) <= MAX_PATH:
            return path
        if any(len(os.fsencode(part)) > MAX_NAME for part in parts) or any(parent in entries for parent in above):
            return path
    return None


def difference(before: Tree, after: Tree) -> str:
    """A patch that makes `after` of `before`, as `git diff --binary` prints it; bytes that are no UTF-8 as surrogates."""
    changed = [path for path in sorted({*before, *after}) if before.get(path) != after.get(path)]
    if not changed:
        return ""
    with tempfile.TemporaryDirectory() as scratch:
        for side, entries in (("a", before), ("b", after)):
            os.mkdir(f"{scratch}/{side}")
            for path in changed:
                if entry := entries.get(path):
                    place = os.path.join(scratch, side, path)
                    os.makedirs(os.path.dirname(place), exist_ok=True)
                    if entry.mode == 0o120000:
                        os.symlink(entry.data, place)
                    else:
                        with open(place, "wb") as file:
                            file.write(entry.data)
                        os.chmod(place, entry.mode & 0o777)
        command = ["git", "-c", "core.autocrlf=false", "diff", "--no-index", "--no-prefix", "--binary", "--no-color"]
        environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        command += ["--no-ext-diff", "--no-textconv", "--no-renames", "a", "b"]
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True)
    if done.returncode != 1 or not done.stdout:  # 1: there is a difference
        raise RuntimeError(f"git diff ended with {done.returncode}: {done.stderr.decode(errors='replace')[-300:]}")
    return done.stdout.decode("utf-8", "surrogateescape")
