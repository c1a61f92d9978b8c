"""Checkpoints of a run: a directory per saved step, written in the background so that a crash at any moment leaves the ones before
it whole.

    step-00000010/
      __0_0.distcp ...   tensors, by torch.distributed.checkpoint: each rank its own, readable by any number of ranks
      .metadata          which tensor is where
      state.json         everything that is not a tensor
      sha256.json        checksums of all of it

A state is a dict of dicts and lists with tensors and JSON values at the leaves. `save` copies the tensors; a thread writes them to
`step-00000010.tmp`, syncs, and renames: the new name is the mark that a checkpoint is complete. Reading checks every byte; a
damaged checkpoint is named, left where it is, and the one before it is used.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

KEEP = 2  # newest checkpoints that stay while a run goes on
VALUES, SUMS = "state.json", "sha256.json"
PIECE = 1 << 24  # bytes hashed at once


class Checkpoints:
    """The checkpoints of a directory. group: the ranks that save together, each what it holds; its messages come from a thread of
    their own, so it must not be used for anything else."""

    def __init__(self, directory: Path, keep: int = KEEP, group: dist.ProcessGroup | None = None):
        self.directory, self.keep, self.group = directory, keep, group
        self.intact: list[Path] = []  # those this process wrote or read, oldest first
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None

    def paths(self) -> list[Path]:
        """Complete ones, newest first."""
        return sorted((p for p in self.directory.glob("step-*") if re.fullmatch(r"step-\d{8}", p.name)), reverse=True)

    def save(self, step: int, state: dict, *, background: bool = False) -> Path:
        """Writes the state of `step`, once the save before has ended; OSError where either fails, on a full disk for instance.
        background: returns when the tensors are copied, and a later call raises."""
        self.wait()
        path = self.directory / f"step-{step:08d}"
        if path not in self.intact:
            tensors, values = _split(state)
            staged = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            self._writing = self._thread.submit(self._write, path, staged, values)
        if not background:
            self.wait()
        return path

    def wait(self) -> None:
        """Returns once nothing is being written; OSError where it could not be."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, path: Path, tensors: dict[str, Tensor], values: dict) -> None:
        temporary = path.with_suffix(".tmp")
        is_first = self.group is None or self.group.rank() == 0
        if is_first:
            self.directory.mkdir(parents=True, exist_ok=True)
            for stale in self.directory.glob("step-*.tmp"):  # of a process that was killed
                _remove(stale)
            temporary.mkdir()
        try:
            self._barrier()
            writer = dcp.FileSystemWriter(temporary)  # syncs its files
            with _quiet():
                dcp.save(tensors, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
            sums = self._gather_sums(temporary)
            if is_first:
                _write_json(temporary / VALUES, values)
                sums[VALUES] = _digest(temporary / VALUES)
                _write_json(temporary / SUMS, sums)
                _sync(temporary)
                if path.exists():  # damaged, or it would be in `intact`
                    path.rename(path.with_suffix(".damaged"))
                temporary.rename(path)
                _sync(self.directory)
            self._barrier()
        except BaseException as error:
            if is_first:
                _remove(temporary)
            reason = _os_error(error)
            if reason:
                raise OSError(f"checkpoint {path} cannot be written: {reason.strerror}") from error
            raise
        self.intact.append(path)
        if is_first:
            self.prune(self.keep)

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    def _gather_sums(self, directory: Path) -> dict[str, str]:
        """Checksums of what all ranks wrote; each computes those of its own files."""
        rank = 0 if self.group is None else self.group.rank()
        own = [p for p in directory.iterdir() if p.name.startswith(f"__{rank}_") or (rank == 0 and p.name == ".metadata")]
        sums = {path.name: _digest(path) for path in own}
        if self.group is None:
            return sums
        gathered: list[dict] = [{}] * self.group.size()
        dist.all_gather_object(gathered, sums, self.group)
        return {name: value for part in gathered for name, value in part.items()}

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` of those known to be intact. A name goes before its contents do, so that nothing half
        removed looks complete."""
        while len(self.intact) > keep:
            oldest = self.intact.pop(0)
            if oldest.exists():
                _remove(oldest.rename(oldest.with_suffix(".tmp")))

    def newest(self) -> Path:
        """Newest intact checkpoint. FileNotFoundError where there is none, ValueError where all are damaged."""
        paths = self.paths()
        if not paths:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        damaged = []
        for path in paths:
            try:
                _verify(path)
            except (OSError, ValueError) as error:
                damaged.append(f"{path} ({error})")
                continue
            if damaged:
                warnings.warn(f"damaged checkpoint left untouched: {'; '.join(damaged)}. Using {path}", stacklevel=2)
            self.intact = [p for p in reversed(paths) if p <= path]
            return path
        raise ValueError(f"every checkpoint is damaged; left untouched: {'; '.join(damaged)}")

    def load(self) -> dict:
        """State of the newest intact checkpoint, in new tensors."""
        return read_state(self.newest())


def read_values(path: Path) -> dict:
    """The part of a checkpoint that is not tensors."""
    return json.loads((path / VALUES).read_text())


def read_state(path: Path, into: dict | None = None, only: str = "") -> dict:
    """State of a checkpoint, or its part under the key `only`. Tensors of `into` are filled where they fit (same place, shape and
    type), others are made."""
    targets = _split(into or {})[0]
    tensors = {}
    for name, entry in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        is_wanted = not only or name.split("/")[0] == only
        if is_wanted and isinstance(entry, TensorStorageMetadata):
            target = targets.get(name)
            fits = target is not None and target.shape == entry.size and target.dtype == entry.properties.dtype
            tensors[name] = target.detach() if fits else torch.empty(entry.size, dtype=entry.properties.dtype)
    if tensors:
        with _quiet():
            dcp.load(tensors, checkpoint_id=path, no_dist=not dist.is_initialized())
    state = {} if only else read_values(path)
    for name, tensor in tensors.items():
        *parents, leaf = name.split("/")
        inside = state
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[leaf] = tensor
    return state


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning, at each save and load, that there is one process only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _split(state: dict, prefix: str = "") -> tuple[dict[str, Tensor], dict]:
    """Tensors by path ('optimizer/head/exp_avg') and what remains of the state without them."""
    tensors, values = {}, {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[prefix + name] = value
        elif isinstance(value, dict):
            inside, values[name] = _split(value, f"{prefix}{name}/")
            tensors |= inside
        else:
            values[name] = value
    return tensors, values


def _digest(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            sha.update(piece)
    return sha.hexdigest()


def _verify(path: Path) -> None:
    """ValueError or OSError naming the first file that is missing or not what was written."""
    for name, expected in json.loads((path / SUMS).read_text()).items():
        if _digest(path / name) != expected:
            raise ValueError(f"checksum of {name} is wrong")


def _write_json(path: Path, value: dict) -> None:
    with path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _os_error(error: BaseException) -> OSError | None:
    """The operating system's reason behind an error of torch's writers, if there is one."""
    pending = [error]
    while pending:
        error = pending.pop()
        if isinstance(error, OSError):
            return error
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        pending += [e for e in (error.__cause__, error.__context__, *(wrapped[0] for wrapped in failures)) if e is not None]
    return None
