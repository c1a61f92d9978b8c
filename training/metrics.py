"""Metrics of a run: `metrics.jsonl`, one record per line; the load of every expert in `loads.jsonl`; the same numbers as
TensorBoard events, and for W&B and trackio where they are asked for."""

import importlib
import json
import math
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

METRICS, LOADS = "metrics.jsonl", "loads.jsonl"
TRACKERS = ("tensorboard", "wandb", "trackio")


def read_metrics(path: Path) -> list[dict]:
    """Records of a metrics file; a line cut short by a crash is skipped; no file, no records."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def write_metrics(path: Path, records: list[dict]) -> None:
    """Replaces the file in one step."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
    temporary.replace(path)


class Metrics:
    """Appends records everywhere; on a resumed run, records of steps after `step` are dropped first, because those steps run again.
    trackers: names of TRACKERS, by commas; ValueError for others, ImportError where one is not installed."""

    def __init__(self, run_dir: Path, step: int, trackers: str = "tensorboard", config: dict | None = None):
        names = [name.strip() for name in trackers.split(",") if name.strip()]
        if unknown := set(names) - set(TRACKERS):
            raise ValueError(f"trackers must be of {', '.join(TRACKERS)}, got {', '.join(sorted(unknown))}")
        for name in (METRICS, LOADS):
            path = run_dir / name
            write_metrics(path, [record for record in read_metrics(path) if record["step"] <= step])
        self.file, self.loads = (run_dir / METRICS).open("a"), (run_dir / LOADS).open("a")
        self.events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1) if "tensorboard" in names else None
        self.others = [importlib.import_module(name) for name in names if name != "tensorboard"]  # both have W&B's interface
        for module in self.others:
            module.init(project="mxmoe", name=run_dir.name, config=config or {}, resume="allow")

    def log(self, step: int, **values: float | int | str) -> None:
        """A number that is not finite is written as null (JSON has no NaN)."""
        clean = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self.file.write(json.dumps({"step": step, **clean}) + "\n")
        self.file.flush()
        numbers = {name: value for name, value in clean.items() if isinstance(value, int | float)}
        if self.events is not None:
            for name, value in numbers.items():
                self.events.add_scalar(name, value, step)
        for module in self.others:
            module.log(numbers | {"step": step})

    def log_loads(self, step: int, loads: list[list[int]]) -> None:
        """Rows per expert of every MoE layer since the record before."""
        self.loads.write(json.dumps({"step": step, "loads": loads}) + "\n")
        self.loads.flush()

    def close(self) -> None:
        self.file.close()
        self.loads.close()
        if self.events is not None:
            self.events.close()
        for module in self.others:
            module.finish()
