"""Byte-level BPE (as GPT-2's: any text, no unknown token), trained on the corpus with the `tokenizers` library."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"  # closes every document
MIN_VOCAB_SIZE = 257  # 256 bytes and END


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Tokenizer with at most vocab_size tokens; ValueError where not even the bytes fit."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE} (256 bytes and {END}), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
