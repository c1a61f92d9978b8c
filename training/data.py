"""Data: a directory of Python files -> two files of token ids (training, held out) -> windows in a reproducible order.

Files are grouped by top-level module (`json/decoder.py` and `json/encoder.py` are both `json`); one module in twenty,
chosen by the hash of its name, is held out. Documents are closed by an end token and written one after the other as
uint16. The result is cached under the hash of everything it was made from; a cache that fails its checksums is
reported and never repaired or removed.
"""

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.tokenizer import END, train_tokenizer

VERSION = 1  # of the cache's layout
MAX_BYTES = 10_000_000  # of source text, so that tokenizing takes seconds
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TABLES = {"encodings", "pydoc_data"}  # of the standard library: generated tables rather than code
SPLITS = ("train", "heldout")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_corpus(root: Path, max_bytes: int = MAX_BYTES) -> dict[str, list[str]]:
    """{"train": texts, "heldout": texts} of the *.py files under root, in a fixed order.

    Modules are taken in the order of their names' hashes, held-out ones first, until max_bytes are reached.
    ValueError where fewer than two modules are found.
    """
    modules: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        module = parts[0].removesuffix(".py")
        if not SKIPPED & set(parts) and module not in TABLES:
            modules.setdefault(module, []).append(path)
    if len(modules) < 2:
        raise ValueError(f"corpus {root} must hold at least 2 Python modules (one is held out), got {len(modules)}")

    order = sorted(modules, key=lambda name: _digest(name.encode()))
    num_heldout = max(1, len(order) // 20)
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    total = 0
    for rank, module in enumerate(order):
        if total >= max_bytes and rank > num_heldout:
            break
        contents = [path.read_text(encoding="utf-8", errors="replace") for path in modules[module]]
        texts["heldout" if rank < num_heldout else "train"] += contents
        total += sum(map(len, contents))
    return texts


@dataclass(frozen=True)
class Tokens:
    """Memory-mapped token ids of the two splits, and where they are kept."""

    train: np.ndarray
    heldout: np.ndarray
    directory: Path  # also holds tokenizer.json

    @property
    def key(self) -> str:
        return self.directory.name


def load_tokens(corpus: str, vocab_size: int, cache_dir: str) -> Tokens:
    """Tokens of the corpus (empty: the standard library), from the cache or made now."""
    if vocab_size > 1 << 16:
        raise ValueError(f"vocab_size must be at most 65536 (token ids are stored as uint16), got {vocab_size}")
    root = Path(corpus or sysconfig.get_path("stdlib"))
    texts = read_corpus(root)
    key = _digest(json.dumps([VERSION, vocab_size, texts]).encode())[:16]
    directory = Path(cache_dir) / key
    if not directory.exists():
        print(f"tokenizing {root} (once; kept in {directory})")
        _build(texts, vocab_size, directory)
    _verify(directory)
    train, heldout = (np.memmap(directory / f"{split}.bin", dtype=np.uint16, mode="r") for split in SPLITS)
    return Tokens(train, heldout, directory)


def _build(texts: dict[str, list[str]], vocab_size: int, directory: Path) -> None:
    """Writes the cache beside its place and renames it there, so that an interrupted build leaves nothing half
    done."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=directory.parent))
    try:
        tokenizer = train_tokenizer(texts["train"], vocab_size)
        tokenizer.save(str(building / "tokenizer.json"))
        for split in SPLITS:
            _encode(tokenizer, texts[split]).tofile(building / f"{split}.bin")
        sums = {path.name: _digest(path.read_bytes()) for path in sorted(building.iterdir())}
        (building / "sha256.json").write_text(json.dumps(sums, indent=1))
        try:
            os.rename(building, directory)
        except OSError:
            if not directory.exists():  # else another process was faster; its files are the same
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    end = tokenizer.token_to_id(END)
    return np.concatenate([np.array([*e.ids, end], dtype=np.uint16) for e in tokenizer.encode_batch_fast(texts)])


def _verify(directory: Path) -> None:
    """ValueError naming the first file of the cache that is missing or not what was written."""
    path = directory / "sha256.json"
    try:
        for name, digest in json.loads(path.read_text()).items():
            path = directory / name
            if _digest(path.read_bytes()) != digest:
                raise ValueError("it differs from what was written")
    except (OSError, ValueError) as error:
        raise ValueError(f"damaged cache file {path}: {error}. Nothing was changed; remove {directory} to build it again") from None


class Windows:
    """Windows of seq_len + 1 tokens (the last of one is the first of the next), shuffled anew each epoch.

    The order depends on (seed, epoch) alone; `state_dict` is the exact position. ValueError where not one window fits.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, seed: int = 0):
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed
        self.num_windows = max(0, len(tokens) - 1) // seq_len
        if not self.num_windows:
            raise ValueError(f"a window needs seq_len + 1 = {seq_len + 1} tokens, got a data set of {len(tokens)}")
        self._start_epoch(0)

    def _start_epoch(self, epoch: int, position: int = 0) -> None:
        self.epoch, self.position = epoch, position
        self.order = np.random.default_rng([self.seed, epoch]).permutation(self.num_windows)

    def window(self, idx: int) -> Tensor:
        """int64 (seq_len + 1,)."""
        start = int(idx) * self.seq_len
        return torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))

    def next_batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Ids and targets (the ids one further), int64 (size, seq_len); runs over the end of an epoch into the
        next."""
        return batch([self.window(self._next_idx()) for _ in range(size)])

    def _next_idx(self) -> int:
        if self.position == self.num_windows:
            self._start_epoch(self.epoch + 1)
        self.position += 1
        return self.order[self.position - 1]

    def spread(self, count: int) -> list[Tensor]:
        """At most `count` windows, evenly spaced over the data, always the same ones."""
        indices = np.linspace(0, self.num_windows - 1, min(count, self.num_windows)).round().astype(int)
        return [self.window(idx) for idx in indices]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, "num_windows": self.num_windows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """ValueError where the state belongs to other data or another seed."""
        for name in ("seed", "num_windows"):
            if state[name] != getattr(self, name):
                raise ValueError(f"data position was saved with {name} {state[name]}, got {getattr(self, name)}")
        self._start_epoch(state["epoch"], state["position"])


def batch(windows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Windows (S + 1,) -> ids and targets, both (B, S)."""
    stacked = torch.stack(windows)
    return stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()
