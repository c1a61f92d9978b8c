"""What a version looks like in the store: a directory `v00000012` with one or both of two files, and a manifest that makes it one.

`whole.safetensors` holds every tensor by its name, so that any safetensors reader opens it (E8M0 scales as the bytes they are).
`delta.safetensors` holds, of each tensor that changed since the version before, the planes of `mxmoe.delta`, compressed with zstd:
`name|gaps`, `name|steps.0` ..., and `name|counts` (changes and gap bytes of each chunk). `manifest.json`, written last, says what
the difference starts from, and of every tensor its shape, its dtype and the hash of its new bits.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import safetensors
import safetensors.torch
import torch
import xxhash
import zstandard
from torch import Tensor

from mxmoe import delta
from mxmoe.delta import Delta

FORMAT = "mxmoe-weights-1"
_LEVEL = 1  # of zstd: higher ones cost time and win next to nothing on such planes


class VersionError(ValueError):
    """A version that is broken, incomplete, or not one that can be applied to what is there."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a version. order: of its values (mxmoe.delta.ORDERS); hash: XXH3-128 of its bits in this version."""

    shape: tuple[int, ...]
    dtype: str
    order: str
    hash: str
    changes: int = 0


@dataclass(frozen=True)
class File:
    """digest: XXH3-128."""

    bytes: int
    digest: str

    @classmethod
    def of(cls, data: bytes) -> "File":
        return cls(len(data), xxhash.xxh3_128_hexdigest(data))


@dataclass(frozen=True)
class Manifest:
    """base: the version that the difference starts from. delta, whole: the files that there are."""

    version: int
    base: int | None
    tensors: dict[str, Entry]
    delta: File | None
    whole: File | None

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT} | asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """Raises VersionError for what is none."""
        try:
            fields = json.loads(data)
            if fields.pop("format") != FORMAT:
                raise VersionError(f"expected the format {FORMAT}")
            tensors = {name: Entry(**entry | {"shape": tuple(entry["shape"])}) for name, entry in fields.pop("tensors").items()}
            files = {kind: File(**fields.pop(kind)) if fields[kind] else fields.pop(kind) for kind in ("delta", "whole")}
            return cls(**fields, **files, tensors=tensors)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise VersionError(f"a manifest of a version cannot be read: {error}") from error


def directory(version: int) -> str:
    return f"v{version:08d}"


def version_of(name: str) -> int | None:
    """12 of "v00000012/manifest.json", None of any other name."""
    head, _, tail = name.partition("/")
    return int(head[1:]) if tail == "manifest.json" and head[:1] == "v" and head[1:].isdigit() else None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bits(t: Tensor) -> memoryview:
    return memoryview(t.detach().reshape(-1).view(torch.uint8).numpy())


def hash_of(t: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(bits(t))


def entries(state: Mapping[str, Tensor], orders: Mapping[str, str]) -> dict[str, Entry]:
    return {
        name: Entry(tuple(t.shape), dtype_name(t.dtype), orders.get(name) or delta.order_of(t.dtype), hash_of(t))
        for name, t in state.items()
    }


def _compressed(plane: Tensor) -> Tensor:
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(bits(plane))
    return torch.from_numpy(np.frombuffer(packed, np.uint8).copy())


def _expanded(name: str, packed: Tensor, expected: int) -> Tensor:
    """The plane of exactly `expected` bytes; a frame that says otherwise is not opened."""
    data = bits(packed)
    if zstandard.frame_content_size(data) != expected:
        raise VersionError(f"{name}: expected a plane of {expected} bytes, got {zstandard.frame_content_size(data)}")
    out = bytearray(zstandard.ZstdDecompressor().decompress(data, max_output_size=max(expected, 1)))
    return torch.frombuffer(out, dtype=torch.uint8) if out else torch.empty(0, dtype=torch.uint8)


def pack_whole(state: Mapping[str, Tensor]) -> bytes:
    e8m0 = torch.float8_e8m0fnu  # not every reader knows it
    return safetensors.torch.save(
        {name: t.detach().view(torch.uint8) if t.dtype == e8m0 else t.detach() for name, t in state.items()}
    )


def unpack_whole(tensors: Mapping[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    """Every tensor of a whole version, checked. Raises VersionError."""
    found = {}
    for name, entry in manifest.tensors.items():
        t = tensors.get(name)
        if t is not None and t.dtype == torch.uint8 and entry.dtype == "float8_e8m0fnu":
            t = t.view(torch.float8_e8m0fnu)
        if t is None or (tuple(t.shape), dtype_name(t.dtype), hash_of(t)) != (entry.shape, entry.dtype, entry.hash):
            raise VersionError(f"version {manifest.version}: {name} in the file is not the one of the manifest")
        found[name] = t
    return found


def pack_delta(deltas: Mapping[str, Delta]) -> bytes:
    planes = {}
    for name, found in deltas.items():
        if not found.num_changes:
            continue
        planes[f"{name}|counts"] = _compressed(torch.stack([found.changes, found.gap_bytes]))
        planes[f"{name}|gaps"] = _compressed(found.gaps)
        for i, plane in enumerate(found.steps):
            planes[f"{name}|steps.{i}"] = _compressed(plane)
    return safetensors.torch.save(planes)


def unpack(data: bytes, expected: File, name: str) -> dict[str, Tensor]:
    """The tensors of the file `name`, checked against the manifest's digest. Raises VersionError."""
    if (got := File.of(data)) != expected:
        raise VersionError(f"{name} is damaged: expected {expected}, got {got}")
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise VersionError(f"{name} is not a safetensors file: {error}") from error


def unpack_delta(planes: Mapping[str, Tensor], name: str, entry: Entry) -> Delta:
    """One tensor's difference out of the planes of a file. Raises VersionError."""
    try:
        size, chunks = getattr(torch, entry.dtype).itemsize, -(-int(np.prod(entry.shape, dtype=np.int64)) // delta.CHUNK)
        counts = _expanded(f"{name}|counts", planes[f"{name}|counts"], 8 * chunks).view(torch.int32).view(2, chunks)
        gaps = _expanded(f"{name}|gaps", planes[f"{name}|gaps"], int(counts[1].sum()))
        steps = [_expanded(f"{name}|steps.{i}", planes[f"{name}|steps.{i}"], int(counts[0].sum())) for i in range(size)]
    except (KeyError, AttributeError, RuntimeError, zstandard.ZstdError) as error:
        raise VersionError(f"the difference of {name} is incomplete: {error}") from error
    return Delta(entry.order, counts[0].contiguous(), counts[1].contiguous(), gaps, torch.stack(steps))
