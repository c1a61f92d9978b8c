"""Layers at rest: content-addressed files of a store.

`<digest>.tar` holds a layer's files, whose manifest has that digest; `<digest>.stack` lists a snapshot's image and layers.
Everything is written beside its place, flushed, and renamed: what has its name is whole.
"""

import json
import os
import subprocess
from pathlib import Path

from rl.environments.manifest import manifest, manifest_digest
from rl.environments.sandbox import SnapshotError

TAR = ["tar", "--xattrs", "--xattrs-include=*", "--numeric-owner", "--sparse"]


class LayerStore:
    def __init__(self, directory: Path):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        for partial in self.directory.glob("*.partial"):  # of a process that was killed while it wrote
            if not Path(f"/proc/{partial.suffixes[-2][1:]}").exists():
                partial.unlink(missing_ok=True)

    def add(self, files: Path) -> str:
        """Store a directory that nobody writes to; its digest."""
        digest = manifest_digest(manifest(files))
        target = self._path(digest, "tar")
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}.partial")
            try:
                _run([*TAR, "-cf", str(partial), "-C", str(files), "."])
                _commit(partial, target)
            finally:
                partial.unlink(missing_ok=True)
        return digest

    def size(self, digest: str) -> int:
        """Bytes that are enough for a layer's files: a tar has at least half a kilobyte of header for each."""
        return 8 * self._existing(digest, "tar").stat().st_size + (1 << 20)

    def extract(self, digest: str, target: Path) -> None:
        """Into an empty directory; SnapshotError unless what came out has this digest."""
        _run([*TAR, "-xpf", str(self._existing(digest, "tar")), "-C", str(target)])
        if (found := manifest_digest(manifest(target))) != digest:
            raise SnapshotError(f"the stored layer {digest[:12]} is damaged: its files hash to {found[:12]}")

    def add_stack(self, digest: str, image: str, layers: list[str]) -> None:
        target = self._path(digest, "stack")
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps({"image": image, "layers": layers}))
            _commit(partial, target)

    def stack(self, digest: str) -> tuple[str, list[str]]:
        try:
            found = json.loads(self._existing(digest, "stack").read_text())
        except ValueError as error:
            raise SnapshotError(f"the stored snapshot {digest[:12]} is damaged: {error}") from error
        return found["image"], found["layers"]

    def _path(self, digest: str, kind: str) -> Path:
        return self.directory / f"{digest}.{kind}"

    def _existing(self, digest: str, kind: str) -> Path:
        path = self._path(digest, kind)
        if not path.is_file():
            raise SnapshotError(f"{digest[:12]} is not in the store")
        return path


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SnapshotError(f"tar failed: {done.stderr.strip()[-300:]}")


def _commit(partial: Path, target: Path) -> None:
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, target)
