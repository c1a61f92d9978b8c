"""Data: corpora -> documents -> token files -> rows without cross-document attention -> batches in one global order."""

from training.data.cache import Tokens, load_tokens, open_tokens
from training.data.stream import IGNORE, Batch, Samples, Stream, batch
from training.data.tokenizer import Vocabulary, load_vocabulary

__all__ = [
    "IGNORE", "Batch", "Samples", "Stream", "Tokens", "Vocabulary", "batch", "load_tokens", "load_vocabulary", "open_tokens",
]  # fmt: skip
