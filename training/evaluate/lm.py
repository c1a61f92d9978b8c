"""What an evaluation asks of a model: likelihoods and continuations. Ours and any transformers model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from training.base import find_base, read_model
from training.data import load_vocabulary
from training.model import KVCache, Model


class LM(Protocol):
    """`window`: most tokens it reads at once; `bos`, `eos`: what begins and ends a document."""

    name: str
    window: int
    bos: int
    eos: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def logits(self, ids_BS: Tensor) -> Tensor:
        """FP32 (B, S, V)."""

    def sample(self, prompt: list[int], count: int, max_new: int, temperature: float, seed: int) -> list[list[int]]:
        """Continuations, each up to and without the end token. Temperature 0 takes the likeliest token."""


def pick(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0.0:
        return logits_BV.argmax(-1)
    probabilities = torch.softmax(logits_BV.float() / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


class OwnLM:
    """A model of this project."""

    def __init__(self, model: Model, vocabulary, name: str, window: int):
        self.model, self.vocabulary, self.name, self.window = model, vocabulary, name, window
        self.bos, self.eos = vocabulary.bos, vocabulary.eos
        self.encode, self.decode = vocabulary.encode, vocabulary.decode

    @torch.no_grad()
    def logits(self, ids_BS: Tensor) -> Tensor:
        return self.model(ids_BS)[0].float()

    @torch.no_grad()
    def sample(self, prompt: list[int], count: int, max_new: int, temperature: float, seed: int) -> list[list[int]]:
        prompt = prompt[-(self.window - max_new) :]
        generator = torch.Generator().manual_seed(seed)
        cache = KVCache(self.model.config, count, len(prompt) + max_new)
        first = cache.allocate()
        logits = self.model(torch.tensor(prompt), cache=cache, slots=[first], lengths=[len(prompt)])[0][-1:]
        slots = [first] + [cache.allocate(like=first) for _ in range(count - 1)]
        logits = logits.expand(count, -1)
        answers: list[list[int]] = [[] for _ in range(count)]
        running = list(range(count))
        for _ in range(max_new):
            tokens = pick(logits, temperature, generator).tolist()
            keep = [i for i, token in enumerate(tokens) if token != self.eos]
            for i in keep:
                answers[running[i]].append(tokens[i])
            running, slots, tokens = ([items[i] for i in keep] for items in (running, slots, tokens))
            if not running:
                break
            logits = self.model(torch.tensor(tokens), cache=cache, slots=slots, lengths=[1] * len(slots))[0]
        return answers


class TransformersLM:
    """A causal language model of transformers, with its tokenizer."""

    def __init__(self, model, tokenizer, name: str, window: int):
        self.model, self.tokenizer, self.name, self.window = model.eval(), tokenizer, name, window
        self.eos = tokenizer.eos_token_id
        self.bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else self.eos

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @torch.no_grad()
    def logits(self, ids_BS: Tensor) -> Tensor:
        return self.model(ids_BS.to(self.model.device)).logits.float().cpu()

    @torch.no_grad()
    def sample(self, prompt: list[int], count: int, max_new: int, temperature: float, seed: int) -> list[list[int]]:
        prompt = prompt[-(self.window - max_new) :]
        torch.manual_seed(seed)
        options = dict(do_sample=True, temperature=temperature, top_k=0) if temperature else dict(do_sample=False)
        out = self.model.generate(
            torch.tensor([prompt] * count, device=self.model.device), max_new_tokens=max_new, pad_token_id=self.eos, **options
        )
        answers = out[:, len(prompt) :].tolist()
        return [answer[: answer.index(self.eos)] if self.eos in answer else answer for answer in answers]


def load_lm(path: str | Path, recipe: str | None = None, window: int | None = None) -> LM:
    """A run, a checkpoint of one, a Hugging Face checkpoint of one of our architectures, or a transformers model. recipe: of the
    experts' arithmetic, for ours (default: the one it was trained with)."""
    path, options = Path(path), {"recipe": recipe} if recipe else {}
    try:
        base = find_base(path)
        model = read_model(base, **options).eval()
    except (NotImplementedError, FileNotFoundError):
        if not (path / "config.json").exists() or "model_type" not in json.loads((path / "config.json").read_text()):
            raise
        from transformers import AutoModelForCausalLM, AutoTokenizer

        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        limit = getattr(theirs.config, "max_position_embeddings", 2048)
        return TransformersLM(theirs, AutoTokenizer.from_pretrained(path), path.name, min(window or limit, limit))
    if base.tokenizer is None:
        raise FileNotFoundError(f"{path} has no tokenizer.json")
    return OwnLM(model, load_vocabulary(base.tokenizer), str(path), window or base.window)


def rolling_nll(lm: LM, ids: list[int], window: int | None = None) -> Tensor:
    """-log p of every token of a document, nats, FP64 (len(ids),): each is predicted once, from at least half a window of the
    tokens before it (or all there are)."""
    window = min(window or lm.window, lm.window)
    stride = max(1, window // 2)
    inputs = [lm.bos, *ids[:-1]]
    out, done = torch.empty(len(ids), dtype=torch.float64), 0
    while done < len(ids):
        start = 0 if done == 0 else done - (window - stride)
        stop = min(start + window, len(ids))
        logits = lm.logits(torch.tensor([inputs[start:stop]]))[0, done - start :]
        out[done:stop] = F.cross_entropy(logits, torch.tensor(ids[done:stop]), reduction="none").double()
        done = stop
    return out
