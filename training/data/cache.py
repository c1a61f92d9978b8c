"""Token files of a corpus, made once and kept.

A directory named by the hash of everything it was made from (texts, tokenizer, fill-in-the-middle):

    tokenizer.json, tokenizer_config.json
    corpus.json                  what was read, dropped and counted
    {train,heldout}.bin          token ids, uint16, or uint32 for vocabularies past 65536
    {train,heldout}.ends.bin     int64, the end of every document in it
    {train,heldout}.source.bin   uint8, the source of every document
    {train,heldout}.learned.bin  uint8, whether a token has a loss; only where some have none
    sha256.json                  checksums, written last

It is written under another name, synced and renamed, so that a crash at any moment leaves nothing that looks finished. A file that
fails its checksum is reported and never repaired or removed.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.data.corpus import SPLITS, Corpus, digest, load_corpus
from training.data.encode import encode_documents
from training.data.tokenizer import OWN, Vocabulary, load_vocabulary, train_tokenizer

VERSION = 2  # of the layout
MAX_BYTES = 10_000_000  # of each source's text, so that tokenizing takes seconds
OWN_LIMIT = 1 << 16  # tokens of our own vocabulary: ids then fit 16 bits


@dataclass(frozen=True)
class Tokens:
    """Memory-mapped token files by split, and where they are kept."""

    directory: Path
    ids: dict[str, np.ndarray]
    ends: dict[str, np.ndarray]
    source: dict[str, np.ndarray]
    learned: dict[str, np.ndarray | None]
    vocabulary: Vocabulary
    info: dict  # corpus.json

    @property
    def key(self) -> str:
        return self.directory.name

    @property
    def train(self) -> np.ndarray:
        return self.ids["train"]

    @property
    def heldout(self) -> np.ndarray:
        return self.ids["heldout"]

    @property
    def bos(self) -> int:
        return self.vocabulary.bos

    @property
    def eos(self) -> int:
        return self.vocabulary.eos

    @property
    def weights(self) -> tuple[float, ...] | None:
        return tuple(self.info["weights"]) if self.info["weights"] else None

    def bytes_per_token(self, split: str) -> float:
        """Of UTF-8 text; end tokens count as tokens."""
        return self.info["bytes"][split] / len(self.ids[split])


def load_tokens(
    corpus: str,
    vocab_size: int,
    cache_dir: str,
    *,
    tokenizer: str = "",
    similarity: float = 1.0,
    fim: float = 0.0,
    max_bytes: int = MAX_BYTES,
    seed: int = 0,
) -> Tokens:
    """Tokens of the corpus, from the cache or made now. tokenizer: see `load_vocabulary`; empty: a BPE of at most vocab_size tokens
    is trained on the corpus. ValueError where the vocabulary does not fit vocab_size."""
    if not tokenizer and vocab_size > OWN_LIMIT:
        raise ValueError(f"vocab_size must be at most {OWN_LIMIT} (token ids are stored as uint16), got {vocab_size}")
    given = load_vocabulary(tokenizer) if tokenizer else None
    if given and given.size > vocab_size:
        raise ValueError(f"vocab_size must be at least {given.size}, the tokenizer's, got {vocab_size}")
    documents = load_corpus(corpus, max_bytes, similarity)
    made_from = [VERSION, digest(given.tokenizer.to_str()) if given else vocab_size, fim, seed if fim else 0, documents.weights]
    key = hashlib.sha256(json.dumps(made_from).encode())
    for split in SPLITS:
        for document in documents.splits[split]:
            key.update(f"{split} {document.source} {document.is_chat} {digest(document.text)}\n".encode())
    directory = Path(cache_dir) / key.hexdigest()[:16]
    if not directory.exists():
        _build(documents, given, vocab_size, fim, seed, directory, corpus)
    return open_tokens(directory)


def open_tokens(directory: Path) -> Tokens:
    """A finished cache directory; ValueError naming the first file that is missing or not what was written."""
    _verify(directory)
    info = json.loads((directory / "corpus.json").read_text())

    def read(split: str, suffix: str, dtype: str) -> np.ndarray:
        path = directory / f"{split}{suffix}.bin"
        return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)

    has_learned = {split: (directory / f"{split}.learned.bin").exists() for split in SPLITS}
    return Tokens(
        directory,
        {split: read(split, "", info["dtype"]) for split in SPLITS},
        {split: np.array(read(split, ".ends", "int64")) for split in SPLITS},
        {split: np.array(read(split, ".source", "uint8")) for split in SPLITS},
        {split: read(split, ".learned", "uint8") if has_learned[split] else None for split in SPLITS},
        load_vocabulary(directory),
        info,
    )


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time; the lock ends with the process."""
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _build(
    documents: Corpus, given: Vocabulary | None, vocab_size: int, fim: float, seed: int, directory: Path, corpus: str
) -> None:
    building = directory.parent / f".building-{directory.name}"
    with _locked(directory.parent):
        if directory.exists():  # another process was faster
            return
        print(f"tokenizing {corpus or 'the default corpus'} (once; kept in {directory})")
        shutil.rmtree(building, ignore_errors=True)  # of a process that was killed: the lock is ours
        building.mkdir()
        try:
            if given is None:
                texts = (document.text for document in documents.splits["train"])
                vocabulary = Vocabulary(train_tokenizer(texts, vocab_size, OWN.special), OWN)
            else:
                vocabulary = given
            vocabulary.save(building)
            _write(documents, vocabulary, fim, seed, building)
            sums = {path.name: digest(path.read_bytes()) for path in sorted(building.iterdir())}
            (building / "sha256.json").write_text(json.dumps(sums, indent=1))
            for path in (*building.iterdir(), building):
                sync(path)
            os.rename(building, directory)
            sync(directory.parent)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _write(documents: Corpus, vocabulary: Vocabulary, fim: float, seed: int, building: Path) -> None:
    dtype = "uint16" if vocabulary.size <= OWN_LIMIT else "uint32"
    info = dict(dtype=dtype, vocab_size=vocabulary.size, weights=documents.weights, dropped=documents.dropped, bytes={})
    for split in SPLITS:
        ends, masks, end = [], [], 0
        with (building / f"{split}.bin").open("wb") as file:
            for ids, learned in encode_documents(documents.splits[split], vocabulary, fim if split == "train" else 0.0, seed):
                np.array(ids, dtype).tofile(file)
                end += len(ids)
                ends.append(end)
                masks.append(np.ones(len(ids), np.uint8) if learned is None else np.array(learned, np.uint8))
        np.array(ends, np.int64).tofile(building / f"{split}.ends.bin")
        np.array([document.source for document in documents.splits[split]], np.uint8).tofile(building / f"{split}.source.bin")
        if any(document.is_chat for document in documents.splits[split]):
            np.concatenate(masks).tofile(building / f"{split}.learned.bin")
        info["bytes"][split] = sum(len(document.text.encode()) for document in documents.splits[split])
    (building / "corpus.json").write_text(json.dumps(info, indent=1) + "\n")


def _verify(directory: Path) -> None:
    path = directory / "sha256.json"
    try:
        for name, expected in json.loads(path.read_text()).items():
            path = directory / name
            if digest(path.read_bytes()) != expected:
                raise ValueError("it differs from what was written")
    except (OSError, ValueError) as error:
        raise ValueError(f"damaged cache file {path}: {error}. Nothing was changed; remove {directory} to build it again") from None
