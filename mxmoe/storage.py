"""MXTensors in a safetensors file: each part is a tensor `<name>.<part>` (8-bit floats as uint8), what else a copy needs to be read
is one JSON object in the file's metadata, with a checksum of every part."""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mxmoe.formats import FORMATS, MXTensor

KIND, VERSION = "mxmoe.mxtensors", "1"
PARTS = ("values", "scales", "global_scale", "offs")
FIELDS = ("format", "axis", "shape", "scope", "scale_layout")


def save_mxtensors(path: str | os.PathLike, tensors: Mapping[str, MXTensor]):
    """Writes them to one file, which appears whole or not at all."""
    path = Path(path)
    stored, entries = {}, {}
    for name, t in tensors.items():
        entries[name] = {field: getattr(t, field) for field in FIELDS} | {"crc32": {}}
        for part in PARTS:
            tensor = getattr(t, part)
            if tensor is not None:
                stored[f"{name}.{part}"] = stored_part = _storable(tensor)
                entries[name]["crc32"][part] = _checksum(stored_part)
    metadata = {"kind": KIND, "version": VERSION, "tensors": json.dumps(entries)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(stored, temporary, metadata)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_mxtensors(path: str | os.PathLike) -> dict[str, MXTensor]:
    """Reads a file of `save_mxtensors`. ValueError naming the file where it is damaged, foreign or of another version."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no MXTensor file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    if metadata.get("kind") != KIND:
        raise ValueError(f"{path} is not a file of MXTensors: metadata 'kind' must be {KIND!r}, got {metadata.get('kind')!r}")
    if metadata.get("version") != VERSION:
        raise ValueError(f"{path} must have version {VERSION!r}, got {metadata.get('version')!r}")
    try:
        return {name: _restore(name, entry, stored) for name, entry in json.loads(metadata["tensors"]).items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


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


def _storable(t: Tensor) -> Tensor:
    t = t.detach().cpu().contiguous()
    return t.view(torch.uint8) if t.element_size() == 1 else t


def _checksum(t: Tensor) -> int:
    return zlib.crc32(t.reshape(-1).view(torch.uint8).numpy())
