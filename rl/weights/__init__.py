"""Weights on their way from the learner to the samplers: through a store, as versions, most of them differences.

A learner's `Publisher` writes; a sampler's `Receiver` fetches while it goes on sampling, pauses, applies, and goes on.
"""

from rl.weights.publisher import Publisher, Receipt
from rl.weights.receiver import Receiver
from rl.weights.store import Store
from rl.weights.version import Manifest, VersionError

__all__ = ["Manifest", "Publisher", "Receipt", "Receiver", "Store", "VersionError"]
