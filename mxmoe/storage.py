"""MXTensors and Routings in safetensors files: each part is a tensor (`<name>.<part>` of an MXTensor, 8-bit floats as uint8), what
else is needed to read them is one JSON object in the file's metadata, with a checksum of every part."""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mxmoe.formats import FORMATS, MXTensor
from mxmoe.routing import Routing

KIND, ROUTING_KIND, VERSION = "mxmoe.mxtensors", "mxmoe.routing", "1"
PARTS = ("values", "scales", "global_scale", "offs")
FIELDS = ("format", "axis", "shape", "scope", "scale_layout")


def save_mxtensors(path: str | os.PathLike, tensors: Mapping[str, MXTensor]):
    """Writes them to one file, which appears whole or not at all."""
    stored, entries, storages = {}, {}, set()
    for name, t in tensors.items():
        entries[name] = {field: getattr(t, field) for field in FIELDS} | {"crc32": {}}
        for part in PARTS:
            tensor = getattr(t, part)
            if tensor is not None:
                tensor = _storable(tensor, storages)
                stored[f"{name}.{part}"] = tensor
                entries[name]["crc32"][part] = _checksum(tensor)
    _write(Path(path), stored, {"kind": KIND, "version": VERSION, "tensors": json.dumps(entries)})


def load_mxtensors(path: str | os.PathLike) -> dict[str, MXTensor]:
    """Reads a file of `save_mxtensors`. ValueError naming the file where it is damaged, foreign or of another version."""
    metadata, stored = _read(path, KIND, "MXTensor")
    try:
        return {name: _restore(name, entry, stored) for name, entry in json.loads(metadata["tensors"]).items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def save_routing(path: str | os.PathLike, routing: Routing):
    """Writes it to one file, which appears whole or not at all."""
    parts = {field.name: getattr(routing, field.name) for field in fields(routing)}
    storages = set()
    stored = {name: _storable(part, storages) for name, part in parts.items() if part is not None}
    checksums = json.dumps({name: _checksum(part) for name, part in stored.items()})
    _write(Path(path), stored, {"kind": ROUTING_KIND, "version": VERSION, "crc32": checksums})


def load_routing(path: str | os.PathLike) -> Routing:
    """Reads a file of `save_routing`. ValueError naming the file where it is damaged, foreign or of another version."""
    metadata, stored = _read(path, ROUTING_KIND, "Routing")
    try:
        for name, checksum in json.loads(metadata["crc32"]).items():
            if _checksum(stored[name]) != checksum:
                raise ValueError(f"checksum of {name} does not match")
        return Routing(**stored)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _write(path: Path, stored: dict[str, Tensor], metadata: dict[str, str]):
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(stored, temporary, metadata)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: str | os.PathLike, kind: str, what: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(metadata, tensors) of a file of that kind."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no {what} file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    if metadata.get("kind") != kind:
        raise ValueError(f"{path} is not a file of {what}s: metadata 'kind' must be {kind!r}, got {metadata.get('kind')!r}")
    if metadata.get("version") != VERSION:
        raise ValueError(f"{path} must have version {VERSION!r}, got {metadata.get('version')!r}")
    return metadata, stored


def _restore(name: str, entry: dict, stored: dict[str, Tensor]) -> MXTensor:
    parts = dict.fromkeys(PARTS)
    for part, checksum in entry["crc32"].items():
        parts[part] = stored[f"{name}.{part}"]
        if _checksum(parts[part]) != checksum:
            raise ValueError(f"checksum of {name}.{part} does not match")
    fmt = FORMATS[entry["format"]]
    fields = {field: entry[field] for field in FIELDS} | {"shape": tuple(entry["shape"])}
    values, scales = parts.pop("values").view(fmt.values_dtype), parts.pop("scales").view(fmt.scales_dtype)
    return MXTensor(values, scales, **parts, **fields)


def _storable(t: Tensor, storages: set[int]) -> Tensor:
    """On the CPU, contiguous, in memory of its own (the format has no shared tensors; copies often share their offs)."""
    t = t.detach().cpu().contiguous()
    if t.untyped_storage().data_ptr() in storages:
        t = t.clone()
    storages.add(t.untyped_storage().data_ptr())
    return t.view(torch.uint8) if t.element_size() == 1 else t


def _checksum(t: Tensor) -> int:
    return zlib.crc32(t.reshape(-1).view(torch.uint8).numpy())
