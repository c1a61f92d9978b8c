"""`Routing`: which expert gets which token, with what weight, in what order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """(Worked example to be written.)"""

    ids: Tensor  # int32 (T, K): expert of each slot; outside [0, E) = no expert
    weights: Tensor  # FP32 (T, K)
    counts: Tensor  # int32 (E,): rows of each expert
    offs: Tensor  # int32 (E,): cumulative ends of the experts' rows
    permutation: Tensor  # int32 (N,): row -> slot t * K + k; -1 past the last row
    inverse: Tensor  # int32 (T, K): slot -> row; -1 where the slot has no expert
    probs_mean: Tensor | None = None  # FP32 (E,): mean over tokens of the normalised scores (load-balance loss)
    z: Tensor | None = None  # FP32 (1,): mean over tokens of logsumexp(logits)^2
