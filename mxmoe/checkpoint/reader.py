"""`Checkpoint`: a Hugging Face checkpoint on disk, read weight by weight."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mxmoe.checkpoint.encodings import ENCODINGS, encoding_of
from mxmoe.checkpoint.shards import Stored, read, read_header
from mxmoe.checks import FLOATS, check_choice
from mxmoe.formats import FORMATS, MXTensor

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weight:
    """One weight of a checkpoint: how it is written down, its logical shape, its parts by suffix ("" of a plain tensor)."""

    name: str
    encoding: str  # "plain" or a name in ENCODINGS
    shape: tuple[int, ...]
    parts: Mapping[str, Stored]

    @property
    def files(self) -> str:
        return ", ".join(sorted({str(part.file) for part in self.parts.values()}))


class Checkpoint:
    """A directory of safetensors files, with an index or without, or one such file. Only headers are read until a weight is asked
    for.

    `weights` maps names to what is stored, quantized weights under the name that they stand for (`X.weight`, whatever their parts
    are called and in whichever files they lie); `config` is config.json, {} without one.

    FileNotFoundError: no such directory, or a file that the index names is missing. ValueError, naming file and tensor: truncated,
    damaged or mis-shaped files, a tensor that is in two files, that the index names and no file holds or the other way round, parts
    of a quantized weight that are missing or do not fit."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        tensors = _stored_tensors(self.path)
        self.files = sorted({t.file for t in tensors.values()})
        self.weights = _weights(tensors)
        config = (self.path if self.path.is_dir() else self.path.parent) / "config.json"
        self.config = _read_config(config)
        _check_config(self.config, config, self.weights)

    def __repr__(self) -> str:
        kinds = sorted({w.encoding for w in self.weights.values()})
        return f"Checkpoint({str(self.path)!r}, {len(self.weights)} weights in {len(self.files)} files, {', '.join(kinds)})"

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The weight `name` in its logical shape. Plain tensors come in their own dtype unless another is asked for, quantized ones
        dequantized to float32, bfloat16 (the default) or float16. KeyError: no such weight."""
        weight = self._weight(name)
        if weight.encoding == "plain":
            t = read(weight.parts[""])
            return t if dtype is None else t.to(dtype)
        if dtype is not None:
            check_choice("dtype", dtype, FLOATS)
        return self._decoded(weight, lambda parts: ENCODINGS[weight.encoding].decode(parts, dtype or torch.bfloat16))

    def read_mx(self, name: str) -> MXTensor:
        """A weight stored as `mxfp8`, `nvfp4` or `mxfp4`, as the row copy that it is, nothing rounded; an NVFP4 global scale is the
        reciprocal of what is stored. KeyError: no such weight; ValueError: stored in another way."""
        weight = self._weight(name)
        check_choice(f"the encoding of {name}", weight.encoding, tuple(FORMATS))

        def build(parts: Mapping[str, Tensor]) -> MXTensor:
            values = next(iter(parts.values()))
            stored = parts.get("_global_scale")
            scope, global_scale = ("row", None) if stored is None else ("tensor", stored.reciprocal())
            return MXTensor(values, parts["_scale"], global_scale, weight.encoding, "row", weight.shape, scope)

        return self._decoded(weight, build)

    def read_parts(self, name: str) -> dict[str, Tensor]:
        """The stored tensors of the weight `name`, by suffix."""
        return {suffix: read(part) for suffix, part in self._weight(name).parts.items()}

    def check(self, expected: Mapping[str, tuple[int, ...]], prefix: str = ""):
        """Whether it holds exactly the weights `expected` (name -> shape) under `prefix` (`language_model.` of Kimi K2.5, whose
        other weights are then no matter). ValueError naming every missing, unexpected and mis-shaped one, with its file."""
        here = {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}
        faults = [f"{name} is missing" for name in expected if name not in here]
        faults += [f"{name} in {w.files} is unexpected" for name, w in here.items() if name not in expected]
        faults += [
            f"{name} in {w.files} must have shape {tuple(expected[name])}, got {w.shape}"
            for name, w in here.items()
            if name in expected and w.shape != tuple(expected[name])
        ]
        if faults:
            raise ValueError(f"{self.path} does not hold the expected weights: {'; '.join(faults)}")

    def _weight(self, name: str) -> Weight:
        if name not in self.weights:
            raise KeyError(f"{self.path} has no weight {name!r}")
        return self.weights[name]

    def _decoded(self, weight: Weight, decode):
        try:
            return decode({suffix: read(part) for suffix, part in weight.parts.items()})
        except ValueError as error:
            raise ValueError(f"{weight.name} in {weight.files}, stored as {weight.encoding}: {error}") from error


def _stored_tensors(path: Path) -> dict[str, Stored]:
    """All tensors of the files that belong to it, by name."""
    index = path / INDEX
    if path.is_file():
        files, placed = [path], None
    elif index.is_file():
        try:
            placed = json.loads(index.read_text())["weight_map"]
            files = [path / file for file in sorted(set(placed.values()))]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{index} is damaged: {error!r}") from error
    else:
        files, placed = sorted(path.glob("*.safetensors")), None
    if not files:
        raise FileNotFoundError(f"no safetensors checkpoint at {path}")
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, t in read_header(file).items():
            if name in tensors:
                raise ValueError(f"{name} is duplicated: in {tensors[name].file} and in {file}")
            if placed is not None and placed.get(name) != file.name:
                where = f"in {placed[name]}" if name in placed else "nowhere"
                raise ValueError(f"{name} in {file} is unexpected: the index places it {where}")
            tensors[name] = t
    for name in placed or ():
        if name not in tensors:
            raise ValueError(f"{name} is missing: the index places it in {path / placed[name]}, which does not hold it")
    return tensors


def _weights(tensors: Mapping[str, Stored]) -> dict[str, Weight]:
    """Stored tensors put together to weights."""
    dtypes = {name: t.dtype for name, t in tensors.items()}
    weights, used = {}, set()
    for name, t in tensors.items():
        try:
            found = encoding_of(name, dtypes)
            if found is None:
                continue
            encoding, base = found
            parts = {suffix: tensors[base + suffix] for suffix in ENCODINGS[encoding].suffixes}
            weights[base] = Weight(base, encoding, ENCODINGS[encoding].shape(parts), parts)
        except ValueError as error:
            raise ValueError(f"{t}: {error}") from error
        used |= {part.name for part in parts.values()}
    for name, t in tensors.items():
        if name not in used:
            if name in weights:
                raise ValueError(f"{name} is duplicated: {t} and, quantized, in {weights[name].files}")
            if name.endswith("_scale_inv"):
                raise ValueError(f"{t} is unexpected: no quantized weight belongs to it")
            weights[name] = Weight(name, "plain", t.shape, {"": t})
    return {name: weights[name] for name in sorted(weights)}


def _read_config(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold an object, got {type(config).__name__}")
    return config


def _check_config(config: dict, file: Path, weights: Mapping[str, Weight]):
    """What the config says of block sizes must be what is read here; files do not say it themselves."""
    stated = quantization_config(config) or {}
    block = stated.get("weight_block_size", [128, 128])
    if block != [128, 128] and any(w.encoding == "fp8_block" for w in weights.values()):
        raise ValueError(f"{file}: weight_block_size must be [128, 128], got {block}")
    if not any(w.encoding == "int4" for w in weights.values()):
        return
    for group in stated.get("config_groups", {}).values():
        for key, expected in ENCODINGS["int4"].scheme.items():
            if (group.get("weights") or {}).get(key, expected) != expected:
                raise ValueError(f"{file}: {key} of packed weights must be {expected!r}, got {group['weights'][key]!r}")


def quantization_config(config: dict) -> dict | None:
    """Of the model or, in a model of several parts, of its language model."""
    return config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
