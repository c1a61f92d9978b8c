"""Conversion of a checkpoint as Kimi-K2.5 stores it, beside `cp` with fsync, on the disk of the temporary directory."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.bars.harness import Bar, NotMeasured, Run
from benchmarks.machine import ROOT

BYTES, SHARD = 6 * 10**9, 10**9
WIDTHS = dict(gate_proj=(2048, 7168), up_proj=(2048, 7168), down_proj=(7168, 2048))
PROGRAM = """
import resource, sys, time
from mxmoe.checkpoint import convert
start = time.perf_counter()
done = convert(sys.argv[1], sys.argv[2], "mxfp8", max_shard_bytes=int(sys.argv[3]))
print(done.bytes_read + done.bytes_written, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, time.perf_counter() - start)
"""


def expert(name: str) -> dict[str, torch.Tensor]:
    """Random INT4 codes with BF16 scales, as `pack-quantized` has them."""
    tensors = {}
    for projection, (rows, columns) in WIDTHS.items():
        weight = f"{name}.{projection}.weight"
        tensors[f"{weight}_packed"] = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32)
        tensors[f"{weight}_scale"] = (torch.rand(rows, columns // 32) + 0.5).bfloat16() / 1024
        tensors[f"{weight}_shape"] = torch.tensor([rows, columns])
    return tensors


def write_checkpoint(directory: Path, total: int) -> None:
    """Experts of as many layers as fill `total` bytes, in files of about SHARD, with an index."""
    directory.mkdir()
    each = sum(rows * columns * 9 // 16 for rows, columns in WIDTHS.values())
    num_files = max(1, round(total / SHARD))
    index = {}
    for i in range(num_files):
        tensors = {}
        for e in range(max(1, total // num_files // each)):
            tensors |= expert(f"language_model.model.layers.{i + 1}.mlp.experts.{e}")
        file = directory / f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        save_file(tensors, file)
        index |= dict.fromkeys(tensors, file.name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}}))


@contextmanager
def checkpoint(run: Run) -> Iterator[Path]:
    """A directory on disk that holds the checkpoint `in`. NotMeasured where it does not fit."""
    total = run.count(BYTES)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if shutil.disk_usage(directory).free < 6 * total:
            raise NotMeasured(f"{6 * total / 1e9:.0f} GB of disk are needed in {directory}")
        write_checkpoint(directory / "in", total)
        subprocess.run(["sync", "-f", directory], check=True)
        yield directory


def converted(directory: Path) -> tuple[float, float]:
    """(bytes a second, peak memory in bytes) of a conversion in a process of its own, without the start of Python."""
    arguments = [sys.executable, "-c", PROGRAM, directory / "in", directory / "out", str(SHARD)]
    output = subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    shutil.rmtree(directory / "out")
    moved, peak, seconds = map(float, output.split())
    return moved / seconds, peak


def copied(directory: Path) -> float:
    """Bytes a second of `cp` and fsync of every file."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", directory / "in", directory / "copy"], check=True)
    subprocess.run(["sync", *(directory / "copy").iterdir()], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(directory / "copy")
    return 2 * sum(file.stat().st_size for file in (directory / "in").iterdir()) / seconds


def rate(run: Run) -> float:
    """(Bytes read + written) a second over cp's before and after."""
    with checkpoint(run) as directory:
        before, (ours, _), after = copied(directory), converted(directory), copied(directory)
    run.note(f"cp {before / 1e9:.2f} and {after / 1e9:.2f} GB/s, convert {ours / 1e9:.2f} GB/s")
    return 2 * ours / (before + after)


def memory(run: Run) -> float:
    """Peak resident memory less two files, GB."""
    with checkpoint(run) as directory:
        _, peak = converted(directory)
    run.note(f"peak {peak / 1e9:.2f} GB, files of {SHARD / 1e9:.0f} GB")
    return (peak - 2 * SHARD) / 1e9


BARS = [
    Bar("conversion of 6 GB INT4 to mxfp8: rate / cp with fsync", ">=", 0.5, "x", rate, kind="ratio", long=True),
    Bar("conversion of 6 GB INT4: memory beyond two files", "<=", 1, "GB", memory, long=True),
]
