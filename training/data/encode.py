"""Documents -> token ids, and which of them are learned from.

A plain document is its tokens and the end token. With fill-in-the-middle (arXiv 2207.14255) some are cut at two random
characters and become `<prefix> A <suffix> C <middle> B <end>`. A conversation is its messages in the tokenizer's own format; only
what the assistant says, its tool calls and the token that ends its turn are learned from.
"""

import json
from collections.abc import Iterator

import numpy as np

from training.data.corpus import Document, digest
from training.data.tokenizer import ROLES, Vocabulary

CHUNK = 1000  # documents that are encoded together


def encode_documents(
    documents: list[Document], vocabulary: Vocabulary, fim: float = 0.0, seed: int = 0
) -> Iterator[tuple[list[int], list[bool] | None]]:
    """(ids with the end token, which of them are targets or None for all) of every document. fim: share of plain documents with a
    missing middle; which ones and where depends on seed and text alone."""
    if fim and vocabulary.fim is None:
        raise ValueError(f"fim needs a tokenizer with the tokens {', '.join(vocabulary.family.fim)}")
    for first in range(0, len(documents), CHUNK):
        chunk = documents[first : first + CHUNK]
        plain = iter(vocabulary.encode_batch([document.text for document in chunk if not document.is_chat]))
        for document in chunk:
            if document.is_chat:
                yield render(json.loads(document.text), vocabulary)
                continue
            ids, cut = next(plain), _cut(document.text, fim, seed) if fim else None
            if cut is not None:
                parts = vocabulary.encode_batch(cut)
                ids = [token for mark, part in zip(vocabulary.fim, parts, strict=True) for token in (mark, *part)]
            yield [*ids, vocabulary.eos], None


def _cut(text: str, fim: float, seed: int) -> list[str] | None:
    """Prefix, suffix and middle of the text, or None where its middle stays."""
    rng = np.random.default_rng([seed, int(digest(text)[:16], 16)])
    if rng.random() >= fim:
        return None
    start, end = sorted(rng.integers(0, len(text) + 1, 2))
    return [text[:start], text[end:], text[start:end]]


def render(messages: list[dict], vocabulary: Vocabulary, *, reply: bool = False) -> tuple[list[int], list[bool]]:
    """Ids of a conversation and whether each is learned from. Messages are OpenAI's: `role`, `content`, and `tool_calls` of the
    assistant. reply: ends with the opening of an answer, for the model to go on, instead of the end token. ValueError for an
    unknown role or a call without a name."""
    if not vocabulary.family.messages:
        raise ValueError("the tokenizer has no known format for conversations")
    ids, learned = ([vocabulary.bos], [False]) if reply else ([], [])  # packing puts it before every document itself

    def add(new: list[int], is_learned: bool) -> None:
        ids.extend(new)
        learned.extend([is_learned] * len(new))

    for message in messages:
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(f"role must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, got {role!r}")
        before, after = vocabulary.family.messages[role]
        is_learned = role == "assistant"
        add(vocabulary.encode_template(before), False)
        add(vocabulary.encode(_text(message.get("content"))), is_learned)
        for call in message.get("tool_calls") or ():
            opening, closing = vocabulary.family.messages["call"]
            add(vocabulary.encode_template(opening), is_learned)
            add(vocabulary.encode(json.dumps(_call(call))), is_learned)
            add(vocabulary.encode_template(closing), is_learned)
        add(vocabulary.encode_template(after), is_learned)
    if reply:
        add(vocabulary.encode_template(vocabulary.family.messages["assistant"][0]), False)
    elif ids[-1:] != [vocabulary.eos]:
        add([vocabulary.eos], False)
    return ids, learned


def _text(content) -> str:
    """A message's text: a string, nothing, or OpenAI's list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _call(call: dict) -> dict:
    function = call.get("function", call)
    if not function.get("name"):
        raise ValueError(f"a tool call needs a name, got {call!r}")
    arguments = function.get("arguments") or {}
    return {"name": function["name"], "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
