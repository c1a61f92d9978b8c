"""The directory of a run, and what stops one."""

import shutil
import signal
import tempfile
import threading
from pathlib import Path

from training.checkpoint import Checkpoints
from training.config import CHANGEABLE, Config, changed, configure
from training.metrics import LOADS, METRICS


class StopRequest:
    """While entered, SIGINT and SIGTERM set `signal` instead of ending the process; a second one ends it as usual."""

    def __init__(self):
        self.signal: int | None = None

    def __enter__(self) -> "StopRequest":
        on_main = threading.current_thread() is threading.main_thread()
        self._previous = {s: signal.signal(s, self._receive) for s in (signal.SIGINT, signal.SIGTERM)} if on_main else {}
        return self

    def _receive(self, number: int, frame) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __exit__(self, *exception) -> None:
        self._restore()


def prepare_run_dir(run_dir: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Makes the directory and proves that it can be written, before any time is spent.

    FileExistsError where it holds a run and neither `resume` nor `overwrite` is given; FileNotFoundError where there
    is nothing to resume; OSError where it cannot be written.
    """
    has_checkpoint = bool(Checkpoints(run_dir / "checkpoints").paths())
    if resume and not has_checkpoint:
        raise FileNotFoundError(f"nothing to resume: no checkpoint in {run_dir / 'checkpoints'}")
    if has_checkpoint and not (resume or overwrite):
        raise FileExistsError(f"{run_dir} holds a run: continue it with --resume or replace it with --overwrite")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise OSError(f"run directory {run_dir} cannot be written: {error.strerror}") from error


def clear_run_dir(run_dir: Path) -> None:
    """Removes what a run has written there and nothing else."""
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in (METRICS, LOADS, "config.json", "result.json", "tokenizer.json", "tokenizer_config.json"):
        (run_dir / name).unlink(missing_ok=True)


def resumed_config(saved: dict, changes: dict) -> Config:
    """The checkpoint's configuration with what the command line changed. ValueError where that may not change."""
    fixed = {n: v for n, v in changes.items() if n not in (*CHANGEABLE, "run_dir") and v != saved[n]}
    if fixed:
        name, value = next(iter(fixed.items()))
        raise ValueError(
            f"a resumed run keeps its {name} ({saved[name]!r}), got {value!r}; only {', '.join(CHANGEABLE)} may change"
        )
    return changed(configure(**saved), **changes)
