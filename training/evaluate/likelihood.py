"""Held-out loss, codebase perplexity and knowledge: what a model's likelihoods say."""

import ast
import math
import random
from pathlib import Path

from training.data.corpus import Document, load_corpus, read_source
from training.evaluate.lm import LM, rolling_nll

OPTIONS = 4  # of a question
CODEBASE = "email"  # package of the standard library, where no code base is given: held out from nothing, the same everywhere


def heldout(lm: LM, corpus: str, limit: int) -> dict[str, float]:
    """Of the corpus's held-out documents, as many as make `limit` characters."""
    nll = tokens = size = 0
    for document in load_corpus(corpus, 1).splits["heldout"]:
        text = document.text[: limit - size]
        ids = [*lm.encode(text), lm.eos]
        nll, tokens, size = nll + float(rolling_nll(lm, ids).sum()), tokens + len(ids), size + len(text.encode())
        if size >= limit:
            break
    return {"held-out loss": nll / tokens, "held-out bits per byte": nll / math.log(2) / size}


def codebase(lm: LM, directory: str, limit: int) -> dict[str, float]:
    """Summed NLL (nats) of a directory's Python files, alphabetically, as one document, and its bits per byte."""
    root = Path(directory)
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    text = "".join(f"# {path.relative_to(root).as_posix()}\n{path.read_text(errors='replace')}\n" for path in files)[:limit]
    if not text:
        raise ValueError(f"{directory} holds no Python files")
    nll = float(rolling_nll(lm, lm.encode(text)).sum())
    return {"codebase NLL": nll, "codebase bits per byte": nll / math.log(2) / len(text.encode())}


def documented_functions(documents: list[Document]) -> list[tuple[str, str]]:
    """(signature, first line of the docstring) of every documented top-level function or method."""
    found = []
    for document in documents:
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
                line = docstring.strip().splitlines()[0]
                if 25 <= len(line) <= 120:
                    module = document.path.removesuffix(".py").replace("/", ".")
                    found.append((f"# {module}\ndef {node.name}({ast.unparse(node.args)}):\n", line))
    return found


def questions(source: str, count: int, seed: int = 0) -> list[tuple[str, list[str], int]]:
    """(function's head, four docstrings, which is its own)."""
    documents = [document for document in read_source(source) if not document.is_chat]
    rng = random.Random(seed)
    rng.shuffle(documents)
    functions = documented_functions(documents[:400])
    if len({line for _, line in functions}) < OPTIONS:
        raise ValueError(f"{source} has too few documented functions to ask about, got {len(functions)}")
    asked = []
    for head, line in rng.sample(functions, min(count, len(functions))):
        others = [other for other in {other: None for _, other in functions} if other != line]
        options = [line, *rng.sample(others, OPTIONS - 1)]
        rng.shuffle(options)
        asked.append((head, options, options.index(line)))
    return asked


def knowledge(lm: LM, source: str, count: int) -> dict[str, float]:
    """Share of the questions whose own docstring gains the most from its function's head: log p(docstring | head) less log
    p(docstring), so that a plain or a long docstring is no better for it. Chance is a quarter."""
    asked = questions(source, count)
    right = 0
    for head, options, answer in asked:
        gains = []
        for option in options:
            start, end = lm.encode(f'{head}    """'), lm.encode(option)
            given = rolling_nll(lm, [*start, *end])[len(start) :].sum()
            alone = rolling_nll(lm, [*lm.encode('    """'), *end])[-len(end) :].sum()
            gains.append(float(alone - given))
        right += gains.index(max(gains)) == answer
    return {"knowledge": right / len(asked)}
