"""Metrics of a run: `metrics.jsonl`, one record per line, and the same numbers as TensorBoard events."""

import json
import math
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


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
    """Appends records to both; on a resumed run, records of steps after `step` are dropped first, because those steps
    run again."""

    def __init__(self, run_dir: Path, step: int):
        path = run_dir / "metrics.jsonl"
        write_metrics(path, [record for record in read_metrics(path) if record["step"] <= step])
        self.file = path.open("a")
        self.events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, **values: float | int | str) -> None:
        """A number that is not finite is written as null (JSON has no NaN)."""
        clean = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self.file.write(json.dumps({"step": step, **clean}) + "\n")
        self.file.flush()
        for name, value in clean.items():
            if isinstance(value, int | float):
                self.events.add_scalar(name, value, step)

    def close(self) -> None:
        self.file.close()
        self.events.close()
