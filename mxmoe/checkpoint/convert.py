"""`convert`: a checkpoint written anew in another encoding, weight by weight."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mxmoe.checkpoint.encodings import ENCODINGS, WRITTEN, irreproducible_groups
from mxmoe.checkpoint.reader import INDEX, Checkpoint, Weight
from mxmoe.checkpoint.shards import Stored, create, lay_out, read_header, sync_directory
from mxmoe.checks import check_choice

ROUTED_EXPERTS = r"\.experts\.\d+\.\w+_proj\.weight$"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")  # files that are not copied
ENCODABLE = (torch.float32, torch.bfloat16, torch.float16)
RECORD = "conversion.json"  # what the directory is a conversion of; an unfinished one goes on only if that is still so


@dataclass
class Conversion:
    """What `convert` did: bytes of the files read and written, weights encoded, INT4 groups that no scale reproduces by weight."""

    bytes_read: int = 0
    bytes_written: int = 0
    encoded: int = 0
    irreproducible: dict[str, int] = field(default_factory=dict)


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    to: str,
    *,
    targets: str = ROUTED_EXPERTS,
    max_shard_bytes: int = 5 * 10**9,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes the checkpoint `source` to the new directory `target` with the weights whose names match the regular expression
    `targets` (routed experts) encoded as `to`: "bf16" or one of mxfp8, nvfp4, mxfp4, int4 in compressed-tensors' layouts, rounded
    once from FP32.

    Other quantized weights are dequantized to BF16; everything else keeps its bytes, and so do weights that are encoded as `to`
    already. Small files (tokenizer, generation settings) are copied, config.json says how to read the new ones. One weight is in
    memory at a time. Atomic: `target` appears when all of it is on disk. Resumable: until then it is `target`.partial, whose
    finished files are kept; calling again goes on. progress(bytes of weights read so far, of all).

    ValueError: `target` is there, `target`.partial is of another conversion or another process writes it, a weight has no layout as
    `to`, `targets` is no regular expression; and those of `Checkpoint`. OSError: no space, found before a file is begun.
    """
    check_choice("to", to, ("bf16", *WRITTEN))
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    source, target = Checkpoint(source), Path(target)
    if target.exists():
        raise ValueError(f"target must not exist, got {target}")
    try:
        pattern = re.compile(targets)
    except re.error as error:
        raise ValueError(f"targets must be a regular expression, got {targets!r}: {error}") from error
    plans = [Plan.of(weight, to, pattern) for weight in source.weights.values()]
    shards = _shards(plans, max_shard_bytes)
    with _partial(target, source, dict(to=to, targets=targets, max_shard_bytes=max_shard_bytes)) as partial:
        report = _write_all(source, partial, shards, progress)
        _finish(partial, target, source, shards, to, targets)
    return report


def _write_all(
    source: Checkpoint, partial: Path, shards: list[list[Plan]], progress: Callable[[int, int], None] | None
) -> Conversion:
    """The files that are not there yet."""
    plans = [plan for shard in shards for plan in shard]
    done, report, total = 0, Conversion(), sum(plan.bytes_read for plan in plans)
    for number, shard in enumerate(shards, 1):
        file = partial / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if not file.is_file() or read_header(file) != lay_out(file, _outputs(shard, file))[1]:
            _write(source, file, shard, report, lambda count, before=done: progress and progress(before + count, total))
        done += sum(plan.bytes_read for plan in shard)
        if progress:
            progress(done, total)
    return report


@dataclass(frozen=True)
class Plan:
    """What becomes of one weight: the stored tensors it is written as, and the encoding to make them with (None: its bytes as they
    are)."""

    weight: Weight
    outputs: tuple[Stored, ...]
    encoding: str | None

    @staticmethod
    def of(weight: Weight, to: str, targets: re.Pattern) -> Plan:
        is_target, is_plain = bool(targets.search(weight.name)), weight.encoding == "plain"
        current = "bf16" if is_plain and weight.parts[""].dtype == torch.bfloat16 else weight.encoding
        wanted = to if is_target else "bf16"
        if wanted == current or (is_plain and not is_target):
            return Plan(weight, tuple(weight.parts.values()), None)
        if wanted == "bf16":
            return Plan(weight, (Stored(weight.name, Path(), torch.bfloat16, weight.shape),), "bf16")
        encoding = ENCODINGS[wanted]
        if is_plain and weight.parts[""].dtype not in ENCODABLE:
            raise ValueError(
                f"{weight.name} in {weight.files} cannot be written as {wanted}: it must hold "
                f"{', '.join(map(str, ENCODABLE))}, got {weight.parts[''].dtype}"
            )
        if len(weight.shape) != 2 or weight.shape[1] % encoding.block:
            raise ValueError(
                f"{weight.name} in {weight.files} cannot be written as {wanted}: it must be a matrix with a multiple of "
                f"{encoding.block} columns, got shape {weight.shape}; leave it out of targets"
            )
        example = encoding.encode(torch.zeros(1, weight.shape[1]))
        parts = tuple(
            Stored(
                weight.name + suffix,
                Path(),
                part.dtype,
                (weight.shape[0], *part.shape[1:]) if part.ndim == 2 else tuple(part.shape),
            )
            for suffix, part in example.items()
        )
        return Plan(weight, parts, wanted)

    @property
    def bytes_read(self) -> int:
        return sum(part.nbytes for part in self.weight.parts.values())

    @property
    def bytes_written(self) -> int:
        return sum(part.nbytes for part in self.outputs)

    def make(self, source: Checkpoint) -> tuple[dict[str, Tensor], int]:
        """(tensors to write by name, INT4 groups that no scale reproduces)."""
        name = self.weight.name
        if self.encoding is None:
            return {name + suffix: part for suffix, part in source.read_parts(name).items()}, 0
        if self.encoding == "bf16":
            return {name: source.read(name, torch.bfloat16)}, 0
        plain = self.weight.encoding == "plain"
        w = source.read(name, None if plain else torch.float32)
        try:
            parts = ENCODINGS[self.encoding].encode(w)
        except ValueError as error:
            raise ValueError(f"{name} in {self.weight.files}: {error}") from None
        lost = irreproducible_groups(w, parts) if self.encoding == "int4" else 0
        return {name + suffix: part for suffix, part in parts.items()}, lost


def _outputs(shard: Iterable[Plan], file: Path) -> list[Stored]:
    return [Stored(t.name, file, t.dtype, t.shape) for plan in shard for t in plan.outputs]


def _shards(plans: list[Plan], limit: int) -> list[list[Plan]]:
    """Plans in their order, in files of at most `limit` bytes or one weight."""
    shards, size = [[]], 0
    for plan in plans:
        if shards[-1] and size + plan.bytes_written > limit:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.bytes_written
    return shards


@contextmanager
def _partial(target: Path, source: Checkpoint, options: dict) -> Iterator[Path]:
    """target.partial, new or of the same conversion, for this process alone."""
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in source.files}
    record = json.dumps(dict(source=str(source.path.resolve()), files=files, **options), indent=1, sort_keys=True)
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)  # a directory can be locked: no file is left behind
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing {partial}") from None
        kept = partial / RECORD
        if not kept.exists() and not list(partial.glob("*.safetensors")):
            temporary = partial / f".{RECORD}.tmp"
            temporary.write_text(record)
            os.replace(temporary, kept)
        if not kept.is_file() or kept.read_text() != record:
            raise ValueError(
                f"{partial} holds an unfinished conversion of something else, or with other options: remove it to begin anew"
            )
        yield partial
    finally:
        os.close(lock)


def _write(source: Checkpoint, file: Path, shard: list[Plan], report: Conversion, progress: Callable[[int], None]):
    """One file. The next weight is made while one is written."""
    with create(file, _outputs(shard, file)) as writer, ThreadPoolExecutor(1) as pool:
        writing, count = None, 0
        for plan in shard:
            tensors, lost = plan.make(source)
            if writing is not None:
                writing.result()
            writing = pool.submit(lambda made: [writer.write(name, t) for name, t in made.items()], tensors)
            count += plan.bytes_read
            report.bytes_read += plan.bytes_read
            report.bytes_written += plan.bytes_written
            report.encoded += plan.encoding is not None
            if lost:
                report.irreproducible[plan.weight.name] = lost
            progress(count)
        if writing is not None:
            writing.result()


def _finish(partial: Path, target: Path, source: Checkpoint, shards: list[list[Plan]], to: str, targets: str):
    """Index, config and small files, then the name `target`."""
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for plan in shard for t in plan.outputs}
    total = sum(plan.bytes_written for shard in shards for plan in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if source.path.is_dir():
        for file in source.path.iterdir():
            if file.is_file() and file.suffix not in WEIGHTS and file.name not in (INDEX, RECORD, "config.json"):
                shutil.copy2(file, partial / file.name)
        config = quantized_config(source.config, to, targets)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in partial.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    sync_directory(partial)
    os.rename(partial, target)
    sync_directory(target.parent)


def quantized_config(config: Mapping, to: str, targets: str) -> dict:
    """config.json of a checkpoint whose weights matching `targets` are encoded as `to`, in compressed-tensors' terms."""
    config = json.loads(json.dumps(config))
    holders = [config, config.get("text_config") or {}]
    holder = next((holder for holder in holders if "quantization_config" in holder), config)
    for each in holders:
        each.pop("quantization_config", None)
    if to != "bf16":
        encoding = ENCODINGS[to]
        module = targets.removesuffix("$").removesuffix(r"\.weight")
        holder["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": encoding.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": [f"re:.*{module}$"], "weights": encoding.scheme, "input_activations": None}},
            "ignore": [],
        }
    return config


def progress_line(stream=None) -> Callable[[int, int], None]:
    """Prints bytes done, rate and time left on one line, twice a second."""
    stream, start, last = stream or sys.stderr, time.monotonic(), 0.0

    def show(done: int, total: int):
        nonlocal last
        now = time.monotonic()
        if now - last < 0.5 and done < total:
            return
        last, rate = now, done / max(now - start, 1e-9)
        left = (total - done) / rate if rate else 0
        stream.write(f"\r{done / 1e9:8.2f} of {total / 1e9:.2f} GB read, {rate / 1e9:5.2f} GB/s, {left:5.0f} s left ")
        stream.write("\n" if done == total else "")
        stream.flush()

    return show
