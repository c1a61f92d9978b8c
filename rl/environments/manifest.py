"""What a tree of files is, in one digest: equal for equal names, types, modes, owners, links and bytes.

One line per entry, sorted by path: `path \\0 type mode uid gid size \\0 sha256 or link target or device`. Times are left out, so
that building twice gives the same digest. Overlay layers are trees like others: a whiteout is a character device 0/0, an opaque
directory an extended attribute, and both count.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

LARGE, BLOCK = 1 << 20, 64 << 10
OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


def manifest(root: Path) -> dict[bytes, bytes]:
    """{path relative to root: what is there}, sorted."""
    return dict(sorted(_entries(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), b"")))


def manifest_digest(entries: dict[bytes, bytes]) -> str:
    digest = hashlib.sha256()
    for path, entry in entries.items():
        digest.update(path + b"\0" + entry + b"\n")
    return digest.hexdigest()


def _entries(directory: int, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Walks by descriptors: no path is longer than one name, no link is followed. Closes `directory`."""
    try:
        for name in os.listdir(directory):
            path = prefix + os.fsencode(name)
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            kind, detail = stat.S_IFMT(status.st_mode), b""
            if kind == stat.S_IFDIR:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
                attributes = os.listxattr(inner)
                detail = b"opaque" if any(key in attributes for key in OPAQUE) else b""
                yield from _entries(inner, path + b"/")
            elif kind == stat.S_IFREG:
                detail = _sha256(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory), status.st_size)
            elif kind == stat.S_IFLNK:
                detail = os.fsencode(os.readlink(name, dir_fd=directory))
            elif kind in (stat.S_IFCHR, stat.S_IFBLK):
                detail = b"%d:%d" % (os.major(status.st_rdev), os.minor(status.st_rdev))
            size = status.st_size if kind == stat.S_IFREG else 0
            yield path, b"%o %d %d %d\0%s" % (status.st_mode, status.st_uid, status.st_gid, size, detail)
    finally:
        os.close(directory)


def _sha256(fd: int, size: int) -> bytes:
    """Of the bytes; of a LARGE file, of the places and bytes of the blocks that are not zero: a hole of terabytes takes no time."""
    with open(fd, "rb", buffering=0) as file:
        if size < LARGE:
            return hashlib.file_digest(file, "sha256").hexdigest().encode()
        digest, at = hashlib.sha256(b"blocks of %d\n" % BLOCK), 0
        while (at := _next_data(fd, at)) is not None and (data := os.pread(fd, BLOCK, at)):
            if data.count(0) != len(data):
                digest.update(b"%d\n" % at + data)
            at += BLOCK
        return digest.hexdigest().encode()


def _next_data(fd: int, at: int) -> int | None:
    """The block at or after `at` in which there is data; None behind the last."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA) // BLOCK * BLOCK
    except OSError:  # ENXIO
        return None


def digest_of_stack(image: str, layers: list[str]) -> str:
    """Of layers (their digests, the uppermost first) on an image."""
    return hashlib.sha256("\n".join([image, *layers]).encode()).hexdigest()
