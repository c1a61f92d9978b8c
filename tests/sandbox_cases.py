"""What the tests of sandboxes share: backends where this machine can run them, and one small image made of its own files."""

import shutil
from functools import cache
from pathlib import Path

import pytest

from rl.environments import open_backend
from rl.environments.images import BASIC, ImageStore, Recipe
from rl.environments.sandbox import CannotIsolate, Limits, SandboxBackend, SandboxError, SandboxSpec

BUILD = Path(__file__).parents[1] / "build"
IMAGES = BUILD / "images"  # kept: every worker and run uses the same
SMALL = Limits(memory_bytes=256 << 20, disk_bytes=32 << 20, inodes=4000, pids=64, exec_s=20)


@cache
def image() -> Path:
    return ImageStore(IMAGES).build(Recipe(programs=BASIC, python=True))


def runc() -> str:
    """The machine's, or the one that `make test` unpacks."""
    ours = BUILD / "oci/runc"
    return str(ours) if ours.exists() and not shutil.which("runc") else "runc"


def open_or_skip(name: str, **options) -> SandboxBackend:
    try:
        return open_backend(name, **options)
    except CannotIsolate as error:
        pytest.skip(str(error))
    except SandboxError as error:
        pytest.skip(f"{name}: {error}")


def spec(backend: SandboxBackend, **options) -> SandboxSpec:
    """A small sandbox; the subprocess backend has the machine's own programs, a hosted one its templates."""
    own = {"subprocess": "", "hosted": "base"}
    root = own[backend.name] if backend.name in own else image()
    return SandboxSpec(**{"image": root, "limits": SMALL, "workdir": "/tmp", **options})
