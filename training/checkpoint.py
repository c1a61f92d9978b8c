"""Checkpoints of a run: one file per saved step, written so that a crash at any moment leaves the previous ones
whole."""

import os
import pickle
import re
import warnings
import zipfile
from pathlib import Path

import torch

KEEP = 2  # newest checkpoints that stay while a run goes on


class Checkpoints:
    """The files `step-00000010.pt` of a directory.

    Writing: a temporary file, fsync, rename, fsync of the directory; the rename is the mark that the file is complete.
    Reading: every byte is checked against the archive's CRCs. A damaged file is named, left where it is, and the one
    before it is used.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.intact: list[Path] = []  # files this process wrote or read, oldest first

    def paths(self) -> list[Path]:
        """Newest first."""
        return sorted((p for p in self.directory.glob("step-*.pt") if re.fullmatch(r"step-\d{8}\.pt", p.name)), reverse=True)

    def save(self, step: int, state: dict) -> Path:
        """Writes the state of `step`, then prunes. OSError on a full disk."""
        path = self.directory / f"step-{step:08d}.pt"
        if path in self.intact:
            return path
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:  # a full disk, a second Ctrl-C
            temporary.unlink(missing_ok=True)
            if isinstance(error.__context__, OSError):  # torch's writer reports the reason as an internal error of its own
                raise OSError(f"checkpoint {path} cannot be written: {error.__context__.strerror}") from error
            raise
        if path.exists():  # damaged, or it would be in `intact`
            path.rename(path.with_suffix(".damaged"))
        temporary.rename(path)
        directory = os.open(self.directory, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        self.intact.append(path)
        self.prune(KEEP)
        return path

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` of the files known to be intact."""
        while len(self.intact) > keep:
            self.intact.pop(0).unlink(missing_ok=True)

    def load(self) -> dict:
        """State of the newest intact checkpoint. FileNotFoundError where there is none, ValueError where all are
        damaged."""
        paths = self.paths()
        if not paths:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        damaged = []
        for path in paths:
            try:
                state = _read(path)
            except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, RuntimeError) as error:
                damaged.append(f"{path} ({error})")
                continue
            if damaged:
                warnings.warn(f"damaged checkpoint left untouched: {'; '.join(damaged)}. Using {path}", stacklevel=2)
            self.intact = [p for p in reversed(paths) if p <= path]
            return state
        raise ValueError(f"every checkpoint is damaged; left untouched: {'; '.join(damaged)}")


def _read(path: Path) -> dict:
    with zipfile.ZipFile(path) as archive:
        broken = archive.testzip()
    if broken:
        raise zipfile.BadZipFile(f"checksum of {broken} is wrong")
    return torch.load(path, weights_only=True, map_location="cpu")
