"""Differences of weights between steps of a real optimiser: size beside other codecs on the same change, and speed."""

import sysconfig
import tempfile
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import zstandard
from torch import Tensor

from benchmarks import timing
from benchmarks.bars.harness import Bar, Run
from mxmoe import delta
from tests.test_weights import killed_publishers
from training.model import Model, ModelConfig
from training.optimizer import guarded_step, make_optimizer

CONFIG = dict(
    vocab_size=256, dim=128, num_layers=4, num_heads=4, dense_dim=512, num_experts=16, top_k=4, expert_dim=128,
    kv_lora_rank=64, qk_nope_dim=32, qk_rope_dim=16, v_dim=32,
)  # fmt: skip
WARMUP, ROWS, LENGTH = 60, 4, 256
LARGE = 64_000_000  # elements of the timed tensor: 128 MB of BF16, beyond every cache


def batches(seed: int):
    """Bytes of the standard library, row after row."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    data = torch.from_numpy(np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8).copy()).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(data) - LENGTH - 1, (ROWS,), generator=generator)
        yield torch.stack([data[s : s + LENGTH + 1] for s in starts.tolist()])


@cache
def trace(lr: float, warmup: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """BF16 weights before and after one AdamW step at `lr`, after steps at 3e-4 that fill its moments and 10 at `lr`."""
    torch.manual_seed(0)
    model = Model(ModelConfig(**CONFIG), 0)
    optimizer = make_optimizer(model, 0.0)
    data = batches(0)

    def step(rate: float):
        ids = next(data)
        logits, _ = model(ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        guarded_step(optimizer, rate, 1.0)

    for _ in range(warmup):
        step(3e-4)
    for _ in range(10):
        step(lr)
    before = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    step(lr)
    return before, {name: p.detach().bfloat16() for name, p in model.named_parameters()}


def packed(*planes: Tensor) -> int:
    compress = zstandard.ZstdCompressor(level=1).compress
    return sum(len(compress(np.ascontiguousarray(plane.numpy()).tobytes())) for plane in planes)


def sizes(lr: float, run: Run) -> dict[str, float]:
    """Bytes of all tensors by codec; changes, elements."""
    before, after = trace(lr, run.count(WARMUP, 2))
    total = dict.fromkeys(("ours", "xor", "gaps", "changes", "elements"), 0)
    for name, old in before.items():
        new = after[name]
        found = delta.diff(old, new)
        total["changes"] += found.num_changes
        total["elements"] += old.numel()
        total["ours"] += packed(found.gaps, *found.steps, torch.stack([found.changes, found.gap_bytes]))
        xor = (old.view(torch.int16) ^ new.view(torch.int16)).flatten()
        index = xor.nonzero()[:, 0]
        gaps = torch.diff(index, prepend=torch.tensor([-1]))
        total["xor"] += packed(xor)
        total["gaps"] += packed(gaps.to(torch.int16), xor[index])
    run.note(f"{total['changes'] / total['elements']:.2%} of {total['elements'] / 1e6:.1f} M weights changed")
    return total


def bits_per_change(lr: float, run: Run) -> float:
    total = sizes(lr, run)
    return 8 * total["ours"] / total["changes"]


def times_smaller(than: str, run: Run) -> float:
    total = sizes(2e-6, run)
    return total[than] / total["ours"]


@cache
def large(numel: int) -> tuple[Tensor, Tensor]:
    """Weights and a step that changes about 2 % of them."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(numel, generator=generator) * 0.02
    moved = weight - 1e-6 * (torch.randn(numel, generator=generator) * 0.6).clamp(-1, 1)
    return weight.bfloat16(), moved.bfloat16()


def encoding(run: Run) -> float:
    """GB of dense weights a second through diff and zstd."""
    before, after = large(run.count(LARGE, 1 << 20))

    def encode():
        found = delta.diff(before, after)
        compressor = zstandard.ZstdCompressor(level=1)
        for plane in (found.gaps, *found.steps):
            compressor.compress(memoryview(plane.numpy()))

    seconds = min(timing.once(encode) for _ in range(7))
    return before.nbytes / seconds / 1e9


def applying(run: Run) -> float:
    """GB of dense weights a second; there and back, so that every round starts from the same."""
    before, after = large(run.count(LARGE, 1 << 20))
    found, target = delta.diff(before, after), before.clone()
    seconds = []
    for _ in range(7):
        seconds.append(timing.once(lambda: delta.apply(target, found)))
        if not torch.equal(target.view(torch.int16), after.view(torch.int16)):
            raise AssertionError("not the same bits")
        delta.apply(target, found, backwards=True)
    return before.nbytes / min(seconds) / 1e9


def broken_by_kills(run: Run) -> float:
    """Versions that a reader finds other than they were published, or not at all, after kills -9 of the publisher."""
    with tempfile.TemporaryDirectory() as directory:
        return len(killed_publishers(Path(directory) / "store", run.count(20, 1), seed=1))


BARS = [
    Bar("weights after 20 kills -9 of the publisher", "<=", 0, "broken versions", broken_by_kills, long=True),
    Bar("delta at lr 2e-6: bits per changed BF16 weight", "<=", 10, "bit", partial(bits_per_change, 2e-6)),
    Bar("delta at lr 2e-6: XOR + zstd is larger", ">=", 2, "x", partial(times_smaller, "xor")),
    Bar("delta at lr 2e-6: 16-bit gaps + XOR + zstd are larger", ">=", 1.3, "x", partial(times_smaller, "gaps")),
    Bar("delta: diff and encode, 2 threads", ">=", 2.5, "GB/s of weights", encoding, kind="ratio"),
    Bar("delta: apply, 2 threads", ">=", 4, "GB/s of weights", applying, kind="ratio"),
]
