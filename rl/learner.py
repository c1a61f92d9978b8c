"""The learner: a step over one batch of groups, in micro-batches of packed segments, then new weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mxmoe.checks import check_choice
from rl.hints import HintedTurn
from rl.objective import (
    Correction,
    Estimator,
    LossReport,
    distillation_loss,
    group_advantages,
    kl_penalty,
    pack_by_cost,
    policy_loss,
    token_log_probs,
)
from rl.segments import Segment
from training.model import Model
from training.optimizer import guarded_step


@dataclass(frozen=True)
class TrainSample:
    """A run that is trained on. reward: None: it counts for nothing (see `rl.rewards.Reward.valid`). hints: on turns of its."""

    segments: list[Segment]
    reward: float | None
    hints: tuple[HintedTurn, ...] = ()


@dataclass(frozen=True)
class StepReport:
    """Of one step. tokens: trained. skipped: it had no gradient or one that was not finite, and the weights are as before.

    mismatch: mean of r - 1 - log r between sampler and learner; staleness: of the oldest trained token, in versions. mean_reward:
    as it was trained on, the KL taken off. kl: a sample's mean, in nats; hint_kl: a hinted token's mean; None: there is none.
    """

    loss: float
    tokens: int
    gradient_norm: float
    skipped: bool
    mismatch: float
    dropped: int
    nonfinite: int
    largest_log_ratio: float
    staleness: int
    mean_reward: float
    invalid: int
    kl: float | None = None
    hint_kl: float | None = None


class Learner:
    """Owns the weights. version: of them; a step makes the next.

    micro_tokens: of a micro-batch, about; a longer segment is one by itself. temperature: the sampler's. correction: see
    `rl.objective.Correction`. replay: train with the experts that the sampler recorded, those below `replay_threshold` of the
    router's own replaced. attention_cost: of a token pair against a token, to even out micro-batches.
    reference: a frozen model; `kl_weight` times a sample's KL from it, estimated as `kl_estimator` says, is taken off its reward.
    hint_weight: of the distillation of turns with a hint (`rl.hints`).
    """

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        *,
        lr: float,
        clip_norm: float = 1.0,
        temperature: float = 1.0,
        correction: Correction | None = None,
        standardize: bool = False,
        replay: bool = True,
        replay_threshold: float | None = None,
        micro_tokens: int = 4096,
        attention_cost: float = 1e-3,
        version: int = 0,
        reference: Model | None = None,
        kl_weight: float = 0.0,
        kl_estimator: Estimator = "k1",
        hint_weight: float = 0.0,
    ):
        if micro_tokens < 1:
            raise ValueError(f"micro_tokens must be at least 1, got {micro_tokens}")
        if kl_weight and reference is None:
            raise ValueError(f"kl_weight needs a reference, got {kl_weight} without one")
        check_choice("kl_estimator", kl_estimator, Estimator.__args__)
        self.model, self.optimizer, self.lr, self.clip_norm = model.train(), optimizer, lr, clip_norm
        self.temperature, self.correction, self.standardize = temperature, correction or Correction(), standardize
        self.replay, self.micro_tokens, self.attention_cost, self.version = replay, micro_tokens, attention_cost, version
        self.reference = reference and reference.eval().requires_grad_(False)
        self.kl_weight, self.kl_estimator, self.hint_weight = kl_weight, kl_estimator, hint_weight
        for layer in model.moe_layers:
            layer.replay_threshold = replay_threshold

    def step(self, groups: Sequence[Sequence[TrainSample]]) -> StepReport:
        """One optimiser step over a batch; every group's rewards make its baseline. The version grows, whether or not it moved."""
        parts: list[tuple[Segment, float]] = []
        hints: list[HintedTurn] = []
        rewards, invalid = [], 0
        kls: list[float] = []
        for group in groups:
            earned = [sample.reward for sample in group]
            kl = [0.0] * len(group)
            if self.reference is not None:
                kl = self._kl(group)
                earned = [less(reward, self.kl_weight * k) for reward, k in zip(earned, kl, strict=True)]
            advantages, counts = group_advantages(earned, standardize=self.standardize)
            rewards += [reward for reward, c in zip(earned, counts, strict=True) if c]
            kls += [k for k, c in zip(kl, counts, strict=True) if c]
            invalid += len(group) - int(counts.sum())
            for sample, advantage, c in zip(group, advantages.tolist(), counts.tolist(), strict=True):
                parts += [(segment, advantage) for segment in sample.segments] if c else []
                hints += [turn for turn in sample.hints if turn.hinted != turn.ids] if c and self.hint_weight else []
        oldest = [v for segment, _ in parts if (v := segment.oldest) is not None]
        num_tokens = sum(sum(segment.mask) for segment, _ in parts)
        # A segment of advantage zero has no gradient: its tokens count, but need not be computed.
        moving = [(segment, advantage) for segment, advantage in parts if advantage and any(segment.mask)]
        loss, reports = self._backward(moving, num_tokens)
        hint_kl = self._distil(hints) if hints else None
        norm, moved = torch.zeros(()), False
        if moving or hints:
            norm, moved = guarded_step(self.optimizer, self.lr, self.clip_norm)
        staleness = self.version - min(oldest, default=self.version)
        self.version += 1
        seen = sum(r.tokens for r in reports)
        return StepReport(
            loss=loss,
            tokens=num_tokens,
            gradient_norm=float(norm),
            skipped=not moved,
            mismatch=sum(r.mismatch for r in reports) / max(seen, 1),
            dropped=sum(r.dropped for r in reports),
            nonfinite=sum(r.nonfinite for r in reports),
            largest_log_ratio=max((r.largest_log_ratio for r in reports), default=0.0),
            staleness=staleness,
            mean_reward=math.fsum(rewards) / len(rewards) if rewards else math.nan,
            invalid=invalid,
            kl=math.fsum(kls) / len(kls) if kls and self.reference is not None else None,
            hint_kl=hint_kl,
        )

    def _bins(self, lengths: Sequence[int]) -> list[list[int]]:
        """Indices of what goes into each micro-batch."""
        bins = pack_by_cost(lengths, max(1, -(-sum(lengths) // self.micro_tokens)), self.attention_cost)
        return [indices for indices in bins if indices]

    def _backward(self, parts: list[tuple[Segment, float]], num_tokens: int) -> tuple[float, list[LossReport]]:
        total, reports = 0.0, []
        for indices in self._bins([len(segment.ids) for segment, _ in parts]):
            loss, report = self._loss([parts[i] for i in indices], num_tokens)
            loss.backward()
            total += float(loss.detach())
            reports.append(report)
        return total, reports

    def _loss(self, parts: list[tuple[Segment, float]], num_tokens: int) -> tuple[Tensor, LossReport]:
        segments = [segment for segment, _ in parts]
        logits, ids, own = packed_logits(self.model, segments, self._recorded(segments))
        log_probs = token_log_probs(logits, ids, self.temperature)
        advantages = torch.tensor([advantage for _, advantage in parts], dtype=torch.float32)[own]
        mask = torch.ones(len(own), dtype=torch.bool)
        return policy_loss(log_probs, behaviour_of(segments), advantages, mask, own, num_tokens, self.correction)

    @torch.no_grad()
    def _kl(self, samples: Sequence[TrainSample]) -> list[float]:
        """Of each sample, from the reference with the experts that it chooses. Not finite where a log-probability is not."""
        parts = [(i, segment) for i, sample in enumerate(samples) for segment in sample.segments if any(segment.mask)]
        found = [0.0] * len(samples)
        for indices in self._bins([len(segment.ids) for _, segment in parts]):
            segments = [parts[i][1] for i in indices]
            logits, ids, own = packed_logits(self.reference, segments)
            reference, behaviour = token_log_probs(logits, ids, self.temperature), behaviour_of(segments)
            for position, i in enumerate(indices):
                found[parts[i][0]] += kl_penalty(behaviour, reference, own == position, self.kl_estimator)
        return found

    def _distil(self, turns: Sequence[HintedTurn]) -> float:
        """Backward of `hint_weight` times the mean KL of the turns' tokens from the same weights with the hint; returns it."""
        num_tokens, total = sum(turn.length for turn in turns), 0.0
        for indices in self._bins([len(turn.hinted) for turn in turns]):
            with torch.no_grad():
                teacher, _, _ = packed_logits(self.model, [turns[i].teacher for i in indices])
            logits, _, _ = packed_logits(self.model, [turns[i].student for i in indices])
            loss = distillation_loss(logits, teacher, num_tokens, self.temperature)
            (self.hint_weight * loss).backward()
            total += float(loss.detach())
        return total

    def _recorded(self, segments: list[Segment]) -> list[Tensor] | None:
        return recorded_experts(segments) if self.replay and self.model.moe_layers else None


def packed_logits(model: Model, segments: Sequence[Segment], replay: list[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Segments laid end to end: of the T tokens that they mark, (logits (T, V), ids (T,), which segment each is of (T,)).

    Token i is predicted where i - 1 was read, the first of each by nothing. replay: see `training.model.Model.trunk`.
    """
    lengths = torch.tensor([len(segment.ids) for segment in segments])
    ids = torch.tensor([token for segment in segments for token in segment.ids])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    chosen = marked(segments).nonzero()[:, 0]
    x_TD, _ = model.trunk(ids[None], positions[None], replay=replay)
    own = torch.repeat_interleave(torch.arange(len(segments)), lengths)
    return model.head(x_TD[chosen - 1]), ids[chosen], own[chosen]


def recorded_experts(segments: Sequence[Segment]) -> list[Tensor] | None:
    """What segments laid end to end recorded: (T, K) int32 of every MoE layer; None: one of them did not."""
    if any(segment.experts is None for segment in segments):
        return None
    experts = np.concatenate([segment.experts for segment in segments]).astype(np.int32)
    return [torch.from_numpy(np.ascontiguousarray(experts[:, layer])) for layer in range(experts.shape[1])]


def marked(segments: Sequence[Segment]) -> Tensor:
    """Which tokens of segments laid end to end are predicted: those that the model chose, but for one that begins a segment."""
    return torch.tensor([m and i > 0 for segment in segments for i, m in enumerate(segment.mask)])


def behaviour_of(segments: Sequence[Segment]) -> Tensor:
    """(T,) FP32, the sampler's log-probabilities of the tokens of `packed_logits`."""
    return torch.tensor([p for segment in segments for p in segment.log_probs], dtype=torch.float32)[marked(segments)]


def less(reward: float | None, penalty: float) -> float | None:
    """A reward with a penalty taken off; None, a reward that counts for nothing, where the penalty is not finite."""
    return reward - penalty if reward is not None and math.isfinite(penalty) else None
