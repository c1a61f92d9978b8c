"""The fast CPU backend: thin calls into the compiled core (csrc/host)."""

from mxmoe.backends.host.extension import use_isa

SUPPORTS: frozenset[tuple[str, str]] = frozenset()  # (verb, format)

__all__ = ["SUPPORTS", "use_isa"]
