"""From the answers of a run to the token sequences that are trained on: nothing is decoded and encoded again.

Turns of a conversation grow one sequence: each prompt begins with all tokens before it, so that what the model saw is what it is
trained on. Where a prompt does not (a summary took the place of what was before), a new sequence begins: a chain of segments, every
model token of which earns the run's reward.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rl.sampler import NO_EXPERT, Answer


@dataclass
class Segment:
    """Token by token: ids; whether the model chose it; its log-probability and version where it did (else 0 and -1).

    experts: (tokens, MoE layers, K) int16, NO_EXPERT where the sampler never read the token; None: not recorded.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: np.ndarray | None = None

    @property
    def oldest(self) -> int | None:
        """The oldest version of a trained token."""
        return min((v for v, m in zip(self.versions, self.mask, strict=True) if m), default=None)

    def _append(self, ids: Iterable[int], log_probs: Iterable[float] | None = None, versions: Iterable[int] | None = None) -> None:
        ids = list(ids)
        own = log_probs is not None
        self.ids += ids
        self.mask += [own] * len(ids)
        self.log_probs += log_probs if own else [0.0] * len(ids)
        self.versions += versions if own else [-1] * len(ids)


def segments_of(answers: Iterable[Answer]) -> list[Segment]:
    """The sequences of one run's answers, in order. Raises ValueError for an answer whose lists are not of one length."""
    segments: list[Segment] = []
    for answer in answers:
        if not len(answer.ids) == len(answer.log_probs) == len(answer.versions):
            raise ValueError(
                "an answer must have a log-probability and a version for every token, got "
                f"{len(answer.ids)} tokens, {len(answer.log_probs)} and {len(answer.versions)}"
            )
        prompt = list(answer.request.prompt)
        if not segments or prompt[: len(segments[-1].ids)] != segments[-1].ids:
            segments.append(Segment())
        segment = segments[-1]
        segment._append(prompt[len(segment.ids) :])
        segment._append(answer.ids, answer.log_probs, answer.versions)
        segment.experts = _joined(segment.experts, answer.experts)
    return segments


def _joined(before: np.ndarray | None, now: np.ndarray | None) -> np.ndarray | None:
    """What an answer recorded of all its tokens; of those that it did not read itself, what was recorded before."""
    if now is None or before is None:
        return now
    joined = now.copy()
    held = joined[: len(before)]
    held[:] = np.where(held == NO_EXPERT, before, held)
    return joined
