"""`KVCache`: what attention reads of the tokens before, for many sequences of different lengths.

    cache = KVCache(model.config, num_slots=8, capacity=1024)
    a, b = cache.allocate(), cache.allocate()
    model(prompts, cache=cache, slots=[a, b], lengths=[5, 9])   # 14 flat ids: two prompts; the cache holds them now
    c = cache.allocate(like=a)                                  # another answer to the first prompt: its prefix is copied
    model(ids, cache=cache, slots=[a, b, c], lengths=[1, 1, 1]) # one more token each
    cache.truncate(b, 9)                                        # takes tokens back: a rejected draft, a shorter prefix
    cache.free(a)

Layers keep, per slot and position: MLA one vector of latent and rotary key, GQA the keys and values of its few heads, MLA in
deterministic mode the keys and values of all heads. The type is that in which attention reads them, so nothing is rounded twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from training.model.config import ModelConfig
from training.model.sequences import Group, Sequences


def parts_of(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(heads, width) of each tensor that a layer keeps."""
    c = config
    if not c.is_latent:
        return (c.num_kv_heads, c.head_dim), (c.num_kv_heads, c.head_dim)
    if c.deterministic:
        return (c.num_heads, c.qk_dim), (c.num_heads, c.v_dim)
    return ((1, c.kv_lora_rank + c.qk_rope_dim),)


class KVCache:
    """`num_slots` sequences of at most `capacity` tokens each. `lengths[slot]` tokens are there, None where the slot is free."""

    def __init__(self, config: ModelConfig, num_slots: int, capacity: int, device: torch.device | str | None = None):
        if num_slots < 1 or capacity < 1:
            raise ValueError(f"num_slots and capacity must be at least 1, got {num_slots} and {capacity}")
        self.capacity = capacity
        self.lengths: list[int | None] = [None] * num_slots
        self.layers = [
            tuple(
                torch.zeros(num_slots, heads, capacity, width, dtype=config.compute_dtype, device=device)
                for heads, width in parts_of(config)
            )
            for _ in range(config.num_layers)
        ]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for parts in self.layers for t in parts)

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].device

    def allocate(self, like: int | None = None, length: int | None = None) -> int:
        """A free slot, empty or with the first `length` tokens (all, if not given) of slot `like`. RuntimeError: none is free."""
        if None not in self.lengths:
            raise RuntimeError(f"all {len(self.lengths)} slots of the cache are taken")
        slot, held = self.lengths.index(None), 0
        if like is not None:
            held = self._held(like) if length is None else length
            self._check_length(like, held)
            for t in self._tensors():
                t[slot, :, :held] = t[like, :, :held]
        self.lengths[slot] = held
        return slot

    def truncate(self, slot: int, length: int):
        """Keeps the first `length` tokens. ValueError where there are fewer."""
        self._check_length(slot, length)
        for t in self._tensors():  # masked positions are multiplied by zero: they must be finite
            t[slot, :, length : self.lengths[slot]] = 0
        self.lengths[slot] = length

    def free(self, slot: int):
        self.truncate(slot, 0)
        self.lengths[slot] = None

    def sequences(self, slots: Sequence[int], lengths: Sequence[int]) -> Sequences:
        """The batch that goes on `lengths` tokens in each of the slots. ValueError: a slot is free, twice there, or too small."""
        if len(set(slots)) != len(slots) or len(slots) != len(lengths):
            raise ValueError(f"slots must be different ones and as many as lengths, got {list(slots)} and {list(lengths)}")
        past = [self._held(slot) for slot in slots]
        for slot, held, new in zip(slots, past, lengths, strict=True):
            if new < 1 or held + new > self.capacity:
                raise ValueError(f"slot {slot} has {held} of {self.capacity} tokens, got {new} new ones")
        return Sequences.of_slots(lengths, past, slots, self.device)

    def write(self, layer_idx: int, sequences: Sequences, *parts: Tensor):
        """New tokens' parts (T, heads, width) of a layer; they count once `advance` is called."""
        for kept, part in zip(self.layers[layer_idx], parts, strict=True):
            kept[sequences.slot_of_token, :, sequences.positions] = part.detach().to(kept.dtype)

    def read(self, layer_idx: int, group: Group) -> tuple[Tensor, ...]:
        """Parts (B, heads, keys, width) of the group's sequences, as many keys as the longest has."""
        first, count = group.slots[0], len(group.slots)
        in_place = group.slots == tuple(range(first, first + count))
        slots = slice(first, first + count) if in_place else torch.tensor(group.slots, device=self.device)
        return tuple(t[:, :, : group.span][slots] for t in self.layers[layer_idx])

    def advance(self, sequences: Sequences):
        for slot, new in zip(sequences.slots, sequences.lengths, strict=True):
            self.lengths[slot] += new

    def _tensors(self):
        return (t for parts in self.layers for t in parts)

    def _held(self, slot: int) -> int:
        if not 0 <= slot < len(self.lengths) or self.lengths[slot] is None:
            raise ValueError(f"slot {slot} is not allocated")
        return self.lengths[slot]

    def _check_length(self, slot: int, length: int):
        if not 0 <= length <= self._held(slot):
            raise ValueError(f"slot {slot} holds {self.lengths[slot]} tokens, got length {length}")
