"""Environments: sandboxes that an agent works in, and what runs them by the hundred thousand.

`open_backend(name)` gives one node's sandboxes; sandbox.py says what one is. Imports are lazy: a backend loads what it needs.
"""

import importlib

from rl.environments.sandbox import SandboxBackend

BACKENDS = {  # module of rl.environments.backends: its class
    "namespaces": "Namespaces",
    "bubblewrap": "Bubblewrap",
    "oci": "Oci",
    "hosted": "Hosted",
    "subprocess": "Subprocess",
}


def open_backend(name: str = "namespaces", **options) -> SandboxBackend:
    """The backend called `name`, ready; CannotIsolate where this machine cannot keep its promises. There is no fallback."""
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {sorted(BACKENDS)}, got {name!r}")
    return getattr(importlib.import_module(f"rl.environments.backends.{name}"), BACKENDS[name])(**options)
