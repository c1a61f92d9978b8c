"""Search tools: exact (grep) and by meaning (a lexical ranking with symbols; embeddings can take its place)."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl.harness.files import bare, content, glob_pattern, lines_of, listed, shown
from rl.harness.schema import ToolError, tool
from rl.harness.session import Session

MAX_LINE = 300
CHUNK = 40  # lines that are ranked together, half of them shared with the next
MAX_FILES = 5000
MAX_FILE_BYTES = 400_000
K1, B = 1.2, 0.75  # of BM25 (Robertson and Zaragoza, 2009)
SYMBOL = re.compile(
    r"^\s*(?:export\s+|public\s+|private\s+|static\s+|async\s+|pub\s+)*"
    r"(?:def|class|function|func|fn|struct|enum|trait|interface|type|impl|module)\s+\(?[^)\s]*\)?\s*(\w+)?",
    re.MULTILINE,
)


@tool
def grep(session: Session, pattern: str, path: str = ".", glob: str = "", ignore_case: bool = False, limit: int = 100) -> str:
    """Searches files for an extended regular expression; gives path:line:text.

    pattern      the regular expression, as grep -E takes it
    path         file or directory to search
    glob         only files whose path matches, such as *.py
    ignore_case  do not tell small letters from capitals
    limit        how many lines to give
    """
    if not 1 <= limit <= 1000:
        raise ToolError(f"limit: expected 1 to 1000, got {limit}")
    matcher = glob_pattern(glob) if glob else None
    flags = ["-i"] if ignore_case else []
    command = ["grep", "-rnHIEZ", "--exclude-dir=.git", *flags, "-e", pattern, "--", session.argument(path)]
    found = session.run(*command, timeout_s=20, output_bytes=4 << 20)
    if found.exit_code > 1 and not found.stdout:
        raise ToolError(found.stderr.decode(errors="replace").strip()[:500] or f"grep ended with {found.exit_code}")
    lines = []
    for line in found.stdout.decode("utf-8", "replace").split("\n"):
        name, _, rest = line.partition("\0")
        name = name.removeprefix("./")
        if rest and (matcher is None or matcher.fullmatch(name)):
            lines.append(f"{name}:{rest[:MAX_LINE]}{'…' * (len(rest) > MAX_LINE)}")
    lines.sort(key=lambda line: line.split(":", 1)[0])  # grep goes through directories as the file system does
    more = f"\n({len(lines) - limit} more)" if len(lines) > limit else ""
    return (session.text("\n".join(lines[:limit])) or "Nothing matches") + more


@dataclass(frozen=True)
class Chunk:
    """A stretch of a file."""

    path: str
    line: int  # of its first line, from 1
    text: str


def words(text: str) -> list[str]:
    """The words of code and prose: identifiers by their parts and as a whole, in small letters."""
    found = []
    for name in re.findall(r"\w+", text):
        parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_]+", name)
        found += [part.lower() for part in parts]
        if len(parts) > 1:
            found.append(name.lower())
    return found


def chunks(files: dict[str, str]) -> list[Chunk]:
    out = []
    for path, text in files.items():
        lines = [bare(line) for line in lines_of(text)]
        for start in range(0, max(len(lines) - CHUNK // 2, 1), CHUNK // 2):
            out.append(Chunk(path, start + 1, "\n".join(lines[start : start + CHUNK])))
    return out


def lexical(query: str, found: Sequence[Chunk]) -> list[float]:
    """BM25 of each chunk; a word counts three times more where it names a symbol or the file."""
    counts = []
    for chunk in found:
        symbols = " ".join(name for name in SYMBOL.findall(chunk.text) if name)
        counts.append(Counter(words(chunk.text)) + Counter(words(f"{symbols} {chunk.path}") * 3))
    lengths = [sum(count.values()) for count in counts]
    mean = sum(lengths) / max(len(lengths), 1) or 1.0
    scores = [0.0] * len(found)
    for word in set(words(query)):
        holders = sum(word in count for count in counts)
        weight = math.log(1 + (len(found) - holders + 0.5) / (holders + 0.5))
        for i, count in enumerate(counts):
            times = count[word]
            scores[i] += weight * times * (K1 + 1) / (times + K1 * (1 - B + B * lengths[i] / mean)) if times else 0.0
    return scores


RANKERS: dict[str, Callable[[str, Sequence[Chunk]], list[float]]] = {"lexical": lexical}  # embeddings register here


@tool
def codebase_search(session: Session, query: str, path: str = ".", limit: int = 5) -> str:
    """Finds the pieces of the code that have most to do with a question or a description.

    query  what to look for, in words
    path   directory to search
    limit  how many pieces to give
    """
    if not 1 <= limit <= 20:
        raise ToolError(f"limit: expected 1 to 20, got {limit}")
    files = {}
    for name in listed(session, path, 0, False)[:MAX_FILES]:
        try:
            text = content(session, f"{path}/{name}")
        except (ToolError, OSError):  # binary, too large, gone
            continue
        if len(text) <= MAX_FILE_BYTES:
            files[name] = shown(text)
    found = chunks(files)
    scores = RANKERS[session.ranker](query, found)
    best: list[Chunk] = []
    for score, chunk in sorted(zip(scores, found, strict=True), key=lambda pair: -pair[0]):
        if score > 0 and len(best) < limit and not any(b.path == chunk.path and abs(b.line - chunk.line) < CHUNK for b in best):
            best.append(chunk)
    pieces = []
    for chunk in best:
        numbered = "\n".join(f"{chunk.line + i}\t{line[:MAX_LINE]}" for i, line in enumerate(chunk.text.split("\n")))
        pieces.append(f"{chunk.path}\n{numbered}")
    return session.text("\n\n".join(pieces)) or "Nothing found"


SEARCH_TOOLS = (grep, codebase_search)
