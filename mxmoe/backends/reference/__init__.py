"""The definition: every verb in plain PyTorch, written for reading, run on any device."""

SUPPORTS: frozenset[tuple[str, str]] = frozenset()  # (verb, format)
