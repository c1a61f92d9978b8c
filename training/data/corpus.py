"""Corpora: where documents come from, which of them are left out, and which are held out.

A corpus is a comma-separated list of sources, each with an optional weight: `stdlib:3,packages:1,more/chats.jsonl:0.5`.

    stdlib        *.py files of this Python's standard library, without tests and generated tables
    packages      *.py files of the installed pure-Python distributions, without tests
    chats         conversations and tool transcripts made from the standard library (chats.py)
    DIR           *.py files under a directory
    DIR/**/*.rs   files that match a pattern; their repository is the first part of the path after DIR
    FILE.jsonl    one object a line: `text` or `content` (a document) or `messages` (a conversation), and optionally `repo` or
                  `repo_name` or `repository`, and `path`
    FILE.parquet  columns of these names

The split is by repository (a top-level module, a distribution, the field `repo`; a line without one is its own): one
repository in twenty, chosen by the hash of its name, is held out from every source. Copies are dropped, exact ones always, near
ones by MinHash; so are documents that hold a secret. Held-out documents are looked at first: what is a copy of one of them is
not trained on.
"""

import hashlib
import importlib.metadata
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from training.data.chats import conversations

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
TABLES = {"encodings", "pydoc_data"}  # of the standard library: generated tables rather than code
SPLITS = ("train", "heldout")
HELDOUT = 20  # one repository in so many
DEFAULT = "stdlib,packages"
NUM_PERM, SHINGLE = 128, 5  # of MinHash: permutations, words per shingle

# Credentials: a spelling that each begins with or holds, and what makes it one; nearly nothing else matches. The spellings are
# looked for first, which is a hundred times faster.
SECRETS = {
    "PRIVATE KEY": r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----\s+[A-Za-z0-9+/=\s:,-]{64}",
    "AKIA": r"\bAKIA[A-Z0-9]{16}\b",  # AWS
    "ASIA": r"\bASIA[A-Z0-9]{16}\b",
    "ghp_": r"\bghp_[A-Za-z0-9]{36}\b",  # GitHub
    "gho_": r"\bgho_[A-Za-z0-9]{36}\b",
    "ghs_": r"\bghs_[A-Za-z0-9]{36}\b",
    "github_pat_": r"\bgithub_pat_[A-Za-z0-9_]{60}",
    "glpat-": r"\bglpat-[A-Za-z0-9_-]{20}\b",
    "xox": r"\bxox[abprs]-[A-Za-z0-9-]{20,}",  # Slack
    "AIza": r"\bAIza[A-Za-z0-9_-]{35}\b",  # Google
    "k_live_": r"\b[sr]k_live_[A-Za-z0-9]{24}",  # Stripe
    "sk-": r"\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{40,}",
    "hf_": r"\bhf_[A-Za-z]{34}\b",
    "pypi-AgE": r"\bpypi-AgE[A-Za-z0-9_-]{50}",
    "npm_": r"\bnpm_[A-Za-z0-9]{36}\b",
    ".eyJ": r"\beyJ[A-Za-z0-9_-]{20,}\.eyJ[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{20,}",  # JSON web token
}


@dataclass(frozen=True)
class Document:
    """One file, read when its text is asked for, or one text, or one conversation (then the text is the JSON of its messages)."""

    repo: str
    path: str
    source: int = 0  # index in the corpus's list
    given: str = ""  # the text, where there is no file
    file: Path | None = None
    is_chat: bool = False

    @cached_property
    def text(self) -> str:
        return self.given if self.file is None else self.file.read_text(encoding="utf-8", errors="replace")

    def parts(self) -> list["Document"]:
        """Itself; of a file that is to be talked about, the conversations about it."""
        if self.file is None or not self.is_chat:
            return [self]
        made = enumerate(conversations(self.path, self.text))
        return [replace(self, path=f"{self.path}#{i}", given=json.dumps(messages), file=None) for i, messages in made]


@dataclass
class Corpus:
    """The documents of the two splits in a fixed order, the weights of the sources (None: as many as there are), and how many
    documents were dropped for which reason."""

    splits: dict[str, list[Document]]
    weights: tuple[float, ...] | None = None
    dropped: Counter = field(default_factory=Counter)


def digest(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def has_secret(text: str) -> bool:
    return any(spelling in text and re.search(pattern, text) for spelling, pattern in SECRETS.items())


def parse_sources(corpus: str) -> tuple[list[str], tuple[float, ...] | None]:
    """'a:3,b:1' -> (['a', 'b'], (0.75, 0.25)); without weights None. ValueError where only some have one or one is not
    positive."""
    names, weights = [], []
    for entry in (corpus or DEFAULT).split(","):
        match = re.fullmatch(r"(.+?)(?::([0-9.eE+-]+))?", entry.strip())
        if not match:
            raise ValueError(f"corpus must be a list of sources NAME or NAME:WEIGHT, got {corpus!r}")
        names.append(match[1])
        weights.append(float(match[2]) if match[2] else None)
    if all(weight is None for weight in weights):
        return names, None
    if None in weights or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"either every source of a corpus has a positive weight or none has, got {corpus!r}")
    return names, tuple(weight / sum(weights) for weight in weights)


def load_corpus(corpus: str, max_bytes: int, similarity: float = 1.0) -> Corpus:
    """Reads every source up to about max_bytes each, splits and filters. similarity: of two documents' sets of shingles (Jaccard)
    from which the second counts as a copy; 1 drops exact copies only. ValueError where a source has fewer than two
    repositories or nothing is left of a split."""
    names, weights = parse_sources(corpus)
    sources = [split_by_repo(read_source(name, idx), name, max_bytes) for idx, name in enumerate(names)]
    heldout = {document.repo for source in sources for document in source["heldout"]}
    merged: dict[str, list[Document]] = {split: [] for split in SPLITS}
    for source in sources:
        merged["heldout"] += source["heldout"]
        for document in source["train"]:  # a repository that another source holds out is held out here too
            merged["heldout" if document.repo in heldout else "train"].append(document)
    result = Corpus(merged, weights)
    _drop(result, "secret", [has_secret(d.text) for d in _all(result)])
    seen: set[str] = set()
    _drop(result, "copy", [(key := digest(d.text)) in seen or bool(seen.add(key)) for d in _all(result)])
    if similarity < 1.0:
        _drop(result, "near copy", near_copies([d.text for d in _all(result)], similarity))
    for split, documents in result.splits.items():
        if not documents:
            raise ValueError(f"nothing is left of the {split} split of corpus {corpus!r}; dropped: {dict(result.dropped)}")
    return result


def _all(corpus: Corpus) -> list[Document]:
    return corpus.splits["heldout"] + corpus.splits["train"]


def _drop(corpus: Corpus, reason: str, flags: list[bool]) -> None:
    flags = iter(flags)
    for split in reversed(SPLITS):  # the order of _all
        kept = [document for document in corpus.splits[split] if not next(flags)]
        corpus.dropped[reason] += len(corpus.splits[split]) - len(kept)
        corpus.splits[split] = kept


def near_copies(texts: list[str], similarity: float) -> list[bool]:
    """Whether each text resembles an earlier one: MinHash of its shingles of five words, bucketed (LSH), then the estimate of the
    Jaccard similarity itself. Texts of fewer words have no shingles and are never near copies."""
    from rensa import RMinHash, RMinHashDeduplicator

    index = RMinHashDeduplicator(similarity, NUM_PERM, True, seed=0)
    flags = []
    for key, text in enumerate(texts):
        words = text.split()
        shingles = {" ".join(five) for five in zip(*(words[i:] for i in range(SHINGLE)), strict=False)}
        sketch = RMinHash(NUM_PERM, seed=0)
        sketch.update(list(shingles))
        flags.append(bool(shingles) and not index.add(str(key), sketch))
    return flags


def split_by_repo(documents: Iterable[Document], name: str, max_bytes: int) -> dict[str, list[Document]]:
    """Repositories are taken in the order of their names' hashes, held-out ones first, until max_bytes are reached; only files of
    those are read."""
    repos: dict[str, list[Document]] = {}
    for document in documents:
        repos.setdefault(document.repo, []).append(document)
    if len(repos) < 2:
        raise ValueError(f"corpus {name} must hold at least 2 Python modules or repositories (one is held out), got {len(repos)}")
    order = sorted(repos, key=digest)
    num_heldout = max(1, len(order) // HELDOUT)
    splits: dict[str, list[Document]] = {split: [] for split in SPLITS}
    total = 0
    for rank, repo in enumerate(order):
        if total >= max_bytes and splits["train"]:
            break
        taken = [part for document in repos[repo] for part in document.parts()]
        splits["heldout" if rank < num_heldout else "train"] += taken
        total += sum(len(document.text) for document in taken)
    return splits


def read_source(name: str, source: int = 0) -> Iterator[Document]:
    """The documents of one source in a fixed order. OSError or ValueError, naming the place, where it cannot be read."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    if name == "stdlib":
        yield from _files(stdlib.rglob("*.py"), stdlib, source)
    elif name == "chats":
        yield from (replace(document, is_chat=True) for document in _files(stdlib.rglob("*.py"), stdlib, source))
    elif name == "packages":
        yield from _packages(source)
    elif name.endswith(".jsonl"):
        with open(name, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _record(_parse(line, f"{name}:{number}"), f"{name}:{number}", source)
    elif name.endswith(".parquet"):
        import pyarrow.parquet

        try:
            rows = (row for batch in pyarrow.parquet.ParquetFile(name).iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield _record(row, f"{name}:{number}", source)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{name} is no Parquet file: {error}") from None
    elif "*" in name:
        root = Path(name[: name.index("*")].rpartition("/")[0] or ".")
        yield from _files(root.glob(str(Path(name).relative_to(root))), root, source)
    elif Path(name).is_dir():
        yield from _files(Path(name).rglob("*.py"), Path(name), source)
    else:
        known = "a directory, a pattern, a .jsonl or .parquet file, stdlib, packages or chats"
        raise FileNotFoundError(f"corpus {name} must be {known}")


def _files(paths: Iterable[Path], root: Path, source: int) -> Iterator[Document]:
    tables = TABLES if root == Path(sysconfig.get_path("stdlib")) else ()
    for path in sorted(paths):
        parts = path.relative_to(root).parts
        repo = parts[0].removesuffix(".py")
        if not SKIPPED & set(parts) and repo not in tables and path.is_file():
            yield Document(repo, "/".join(parts), source, file=path)


def _packages(source: int) -> Iterator[Document]:
    """Files of the distributions whose wheels say that they are pure Python."""
    for distribution in sorted(importlib.metadata.distributions(), key=lambda d: d.metadata["Name"] or ""):
        if "Root-Is-Purelib: true" in (distribution.read_text("WHEEL") or ""):
            for file in sorted(distribution.files or (), key=str):
                if file.suffix == ".py" and ".." not in file.parts and not SKIPPED & set(file.parts):
                    path = Path(file.locate())
                    if path.is_file():
                        yield Document(distribution.metadata["Name"], str(file), source, file=path)


def _parse(line: str, place: str) -> dict:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected an object, got {type(record).__name__}")
    return record


def _first(record: dict, names: tuple[str, ...]):
    return next((record[name] for name in names if record.get(name) is not None), None)


def _record(record: dict, place: str, source: int) -> Document:
    text, messages = _first(record, ("text", "content")), record.get("messages")
    if not isinstance(text, str) and not messages:
        raise ValueError(f"{place}: expected `text`, `content` or `messages`, got {', '.join(map(str, record)) or 'nothing'}")
    repo = str(_first(record, ("repo", "repo_name", "repository")) or place)
    text = json.dumps(messages) if messages else text.encode(errors="replace").decode()  # JSON may hold halves of characters
    return Document(repo, str(record.get("path") or place), source, text, is_chat=bool(messages))
