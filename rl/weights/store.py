"""Where versions are kept: a directory, or anything that fsspec opens (s3://..., gs://..., memory://...)."""

import os
import uuid
from contextlib import suppress
from pathlib import PurePosixPath

from fsspec.core import url_to_fs


class Store:
    """Named bytes. A name is there whole or not at all: written beside and moved.

    url: a directory or an fsspec URL; made where it is missing. Raises ValueError for an empty one, OSError where the file system
    does.
    """

    def __init__(self, url: str | os.PathLike):
        if not str(url):
            raise ValueError("url must be a directory or an fsspec URL, got an empty one")
        self.fs, self.root = url_to_fs(str(url))
        self.fs.makedirs(self.root, exist_ok=True)

    def _path(self, name: str) -> str:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts:
            raise ValueError(f"name must be a relative path inside the store, got {name!r}")
        return f"{self.root}/{name}"

    def write(self, name: str, data: bytes) -> None:
        """Durable once this returns; an error leaves nothing under the name that was not there before."""
        path = self._path(name)
        part = f"{path}.{uuid.uuid4().hex}.part"
        self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            with self.fs.open(part, "wb") as f:
                f.write(data)
                f.flush()
                if self.local:
                    os.fsync(f.fileno())
            if self.local:
                os.replace(part, path)
            else:
                self.fs.mv(part, path)
        except BaseException:
            if self.fs.exists(part):
                self.fs.rm_file(part)
            raise

    @property
    def local(self) -> bool:
        return "file" in self.fs.protocol

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError where there is none."""
        self.fs.invalidate_cache()
        with self.fs.open(self._path(name), "rb") as f:
            return f.read()

    def names(self) -> list[str]:
        """Of all that is kept, in order; without parts of unfinished writes."""
        self.fs.invalidate_cache()
        found = (str(path).removeprefix(self.root).lstrip("/") for path in self.fs.find(self.root))
        return sorted(name for name in found if not name.endswith(".part"))

    def delete(self, name: str) -> None:
        """Nothing to do where there is none."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))
        if self.local:
            with suppress(OSError):  # not empty, or gone
                os.rmdir(self._path(name).rpartition("/")[0])

    def discard_parts(self) -> None:
        """Remove what writers that died have left."""
        for path in self.fs.find(self.root):
            if str(path).endswith(".part"):
                self.fs.rm_file(path)
