"""Safetensors files by their own headers, one tensor at a time.

A checkpoint is larger than memory. The safetensors library maps whole files and writes whole files; here a tensor is read into
memory that the caller reuses and written where its header says, and damage is named with its file and tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mxmoe.memory import empty

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100 << 20  # the library's own limit
AT_ONCE = 1 << 30  # bytes of one read or write; Linux takes at most 2 GiB


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `nbytes` from byte `start`."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} ({NAMES[self.dtype]} {list(self.shape)}) in {self.file}"


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file. FileNotFoundError; ValueError naming file and tensor where it is truncated, overlaps, has holes,
    holds a name twice, or where a tensor's bytes do not fit its shape."""
    if not file.is_file():
        raise FileNotFoundError(f"no checkpoint file at {file}")
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{file} is truncated or not a safetensors file: its header needs {length} bytes, got {max(size - 8, 0)}"
            )
        if length > LARGEST_HEADER:
            raise ValueError(f"{file} is not a safetensors file: a header of {length} bytes, at most {LARGEST_HEADER} are allowed")
        text = f.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_twins)
        header.pop("__metadata__", None)
        tensors = {name: _stored(name, file, entry, 8 + length) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} has a damaged header: {error}") from error
    _check_coverage(file, tensors, 8 + length, size)
    return tensors


def _no_twins(pairs: list[tuple]) -> dict:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} appears twice")
    return dict(pairs)


def _stored(name: str, file: Path, entry: dict, data: int) -> Stored:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has dtype {entry['dtype']!r}, expected one of {', '.join(DTYPES)}")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"{name} has shape {list(shape)} and data_offsets {[begin, end]}, expected non-negative integers")
    stored = Stored(name, file, DTYPES[entry["dtype"]], shape, data + begin)
    if end - begin != stored.nbytes:
        raise ValueError(f"{name} is mis-shaped: {entry['dtype']} {list(shape)} takes {stored.nbytes} bytes, got {end - begin}")
    return stored


def _check_coverage(file: Path, tensors: dict[str, Stored], data: int, size: int):
    """Tensors follow each other without holes to the end of the file."""
    at = data
    for t in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if t.start != at:
            raise ValueError(f"{file} has a damaged header: {t.name} must begin at byte {at}, got {t.start}")
        at += t.nbytes
        if at > size:
            raise ValueError(f"{file} is truncated: {t.name} ends at byte {at}, the file has {size}")
    if at != size:
        raise ValueError(f"{file} must end at byte {at} with its last tensor, got {size} bytes")


def read(stored: Stored) -> Tensor:
    """The tensor, from its bytes in the file. ValueError where the file has become shorter."""
    t = empty(stored.shape, stored.dtype, torch.empty(0), "host")
    view = _bytes_of(t)
    with stored.file.open("rb", buffering=0) as f:
        f.seek(stored.start)
        done = 0
        while done < len(view):
            count = f.readinto(view[done : done + AT_ONCE])
            if not count:
                raise ValueError(f"{stored} is truncated: {stored.nbytes} bytes expected, got {done}")
            done += count
    return t


def _bytes_of(t: Tensor) -> memoryview:
    return memoryview(t.reshape(-1).view(torch.uint8).numpy())


class ShardWriter:
    """An open file whose header is written; `write` puts tensors in their places, in any order."""

    def __init__(self, fd: int, places: dict[str, Stored]):
        self.fd, self.places = fd, places

    def write(self, name: str, t: Tensor):
        place = self.places.pop(name)
        if (t.dtype, tuple(t.shape)) != (place.dtype, place.shape):
            raise ValueError(f"{name} must be {NAMES[place.dtype]} {list(place.shape)}, got {NAMES[t.dtype]} {list(t.shape)}")
        view, done = _bytes_of(t.contiguous()), 0
        while done < len(view):
            done += os.pwrite(self.fd, view[done : done + AT_ONCE], place.start + done)


def lay_out(file: Path, tensors: Iterable[Stored]) -> tuple[bytes, dict[str, Stored]]:
    """(header, where each tensor goes). Wider elements come first, as the library does, so that all are aligned."""
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name))
    entries, at = {"__metadata__": {"format": "pt"}}, 0
    for t in ordered:
        entries[t.name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    starts = (8 + len(text) + entries[t.name]["data_offsets"][0] for t in ordered)
    places = {t.name: Stored(t.name, file, t.dtype, t.shape, start) for t, start in zip(ordered, starts, strict=True)}
    return len(text).to_bytes(8, "little") + text, places


@contextmanager
def create(file: Path, tensors: Iterable[Stored]) -> Iterator[ShardWriter]:
    """A file of these tensors, which appears whole, and on disk, or not at all. The space is reserved first: a full disk is an
    OSError before any work is done."""
    header, places = lay_out(file, tensors)
    temporary = file.with_name(f".{file.name}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.posix_fallocate(fd, 0, len(header) + sum(t.nbytes for t in places.values()))
        os.pwrite(fd, header, 0)
        writer = ShardWriter(fd, dict(places))
        yield writer
        if writer.places:
            raise ValueError(f"{file} was closed before {next(iter(writer.places))} was written")
        os.fsync(fd)
        os.replace(temporary, file)
        sync_directory(file.parent)
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path):
    """Names in it are on disk too."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
